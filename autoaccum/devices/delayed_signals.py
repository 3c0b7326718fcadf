"""Ctrl-C and other signals, delayed while state must not be left half restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)
"""Signals with handlers that may raise: they end a run, or a call that takes too long."""


class DelayedSignals:
    """A context that delays signals (`_SIGNALS`) with Python handlers to its end, except within a `window`.

    The first signal that a window lets through closes it, so that a second one does not interrupt the handling of the
    first. Only the main thread receives signals; in other threads this does nothing.

    Attributes:
        at_once: Within a window, signals also interrupt an update (`out_of_memory.DelayedInterrupts`).
        delivered: Whether a signal has ended the job: its handler raised.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.delivered = False
        self._is_open = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def __enter__(self) -> DelayedSignals:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)
        self._deliver()

    def ended(self, failure: BaseException) -> bool:
        """Return whether `failure` comes from a signal, and is no error of the code in a window."""
        return self.delivered or isinstance(failure, KeyboardInterrupt)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Deliver signals at once within, and first those that waited."""
        try:
            self._is_open = True
            self._deliver()
            yield
        finally:
            self._is_open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: deliver it, or have it wait."""
        if self._is_open:
            self._handle(number, frame)
        else:
            self._waiting[number] = frame

    def _deliver(self) -> None:
        while self._waiting:
            self._handle(*self._waiting.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Call the original handler: the window closes if it raises, and stays as it was if it returns."""
        was_open, self._is_open = self._is_open, False
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self.delivered = True
            raise
        self._is_open = was_open
