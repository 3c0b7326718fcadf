"""Ctrl-C while live objects train: it takes effect within a trial, and waits while they are put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruptions:
    """Within it SIGINT, and SIGTERM where Python handles it, wait for its end, except in a `window`.

    A window is closed by the first signal it lets through, so that a second one cannot strike while the first is
    being dealt with. Only the main thread hears signals; elsewhere this does nothing.

    Attributes:
        delivered: Whether a window let a signal through.
    """

    def __init__(self) -> None:
        self.delivered = False
        self._is_open = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._deliver()

    def ended(self, failure: BaseException) -> bool:
        """Whether `failure` is an interruption's doing, and no error of what ran in a window."""
        return self.delivered or isinstance(failure, KeyboardInterrupt)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Within, signals take effect at once, those that came before first."""
        try:
            self._is_open = True
            self._deliver()
            yield
        finally:
            self._is_open = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._is_open:
            self._waiting[number] = frame
            return
        self._is_open = False
        self.delivered = True
        self._handlers[number](number, frame)
        self._is_open = True  # The handler went on.

    def _deliver(self) -> None:
        while self._waiting:
            number, frame = self._waiting.popitem()
            self.delivered = True
            self._is_open = False
            self._handlers[number](number, frame)
