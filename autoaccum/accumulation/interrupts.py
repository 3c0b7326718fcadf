"""Ctrl-C, delayed while state must not be left half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DelayedInterrupts:
    """Delays SIGINT, and SIGTERM where Python handles it, until `deliver` or the exit; a second signal acts at once.

    Without it a KeyboardInterrupt can strike between any two bytecodes: half-way through an update, or in the
    `__exit__` of a context manager, which leaves gradients disabled or a hook registered. Only the main thread receives
    signals; in other threads this does nothing. A handler with the attribute `only_records` is left in place, since it
    raises nothing at the first signal and must see the second. It must not be nested.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: dict[int, FrameType | None] = {}

    def __enter__(self) -> DelayedInterrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {
                number: handler
                for number, handler in handlers.items()
                if callable(handler) and not getattr(handler, "only_records", False)
            }
            for number in self._handlers:
                signal.signal(number, self._delay)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._delay:
                signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Call the handlers of the signals that came meanwhile; Python's own raises KeyboardInterrupt."""
        while self._pending:
            number, frame = self._pending.popitem()
            self._handlers[number](number, frame)

    def _delay(self, number: int, frame: FrameType | None) -> None:
        if number in self._pending:
            del self._pending[number]
            self._handlers[number](number, frame)
        else:
            self._pending[number] = frame
