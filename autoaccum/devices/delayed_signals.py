"""Ctrl-C and other signals while something must not be left half done: they wait, or strike where they may."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)
"""Those whose handlers end a run, or a call that takes too long, by an exception."""


class DelayedSignals:
    """Within it signals (`_SIGNALS`) that Python handles wait for its end, except in a `window`.

    A window is closed by the first signal it lets through, so that a second one cannot strike while the first is
    being dealt with. Only the main thread hears signals; elsewhere this does nothing.

    Attributes:
        at_once: For `accumulation.interrupts`: within a window signals strike in the middle of an update, too.
        delivered: Whether a signal has ended what ran: its handler did not return.
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

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Be the handler of a signal."""
        if not self._is_open:
            self._waiting[number] = frame
            return
        self._handle(number, frame)

    def _deliver(self) -> None:
        while self._waiting:
            self._handle(*self._waiting.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Let the handler decide: one that raises closes the window, one that returns leaves it as it was."""
        was_open, self._is_open = self._is_open, False
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self.delivered = True
            raise
        self._is_open = was_open
