"""Ctrl-C, held back to where nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HeldInterrupts:
    """Within it SIGINT, and SIGTERM where Python handles it, wait for `deliver` or the end; a second comes at once.

    A KeyboardInterrupt strikes between any two bytecodes: half-way through an update, or within the `__exit__` of a
    context manager, after which gradients stay disabled or a hook stays registered. Only the main thread hears
    signals; elsewhere this does nothing. A handler that says `only_notes` is left in place: it raises nothing at the
    first signal, and should know when the second comes. So is one that is `at_once`, where copies run that nobody
    needs afterwards. Not to be entered again within itself.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {
                number: handler
                for number, handler in handlers.items()
                if callable(handler)
                and not (getattr(handler, "only_notes", False) or getattr(handler, "at_once", False))
            }
            for number in self._handlers:
                signal.signal(number, self._hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Let the handlers have what has come meanwhile; Python's own raises KeyboardInterrupt."""
        while self._waiting:
            number, frame = self._waiting.popitem()
            self._handlers[number](number, frame)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._waiting:
            del self._waiting[number]
            self._handlers[number](number, frame)
        else:
            self._waiting[number] = frame
