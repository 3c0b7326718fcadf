"""Signals that ask a run to stop: they take effect where no update or checkpoint is half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_ONE_PRESS_SECONDS = 0.5


class StopRequested(BaseException):
    """A signal asked the run to stop. Not an `Exception`, so that no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """Context in which SIGINT, SIGTERM and SIGHUP ask the run to stop; a signal that was ignored (nohup) stays ignored.

    The first signal is only recorded. `check` raises where the run can stop, and within `interruptible` the signal
    raises at once; elsewhere it raises nothing, so it never cuts an update or a checkpoint in two. A second signal
    takes effect at once, as KeyboardInterrupt or SystemExit, and nothing should be written after it. A signal within
    half a second of the first is not a second one: timeout(1), a closed terminal and wrappers send it to the process
    and to its group.

    Forked children inherit the handlers: SIGTERM ends them as usual. A terminal sends the other signals to the whole
    group, so children leave the first one to the parent, which ends its workers. Only the main thread can handle
    signals; in other threads this does nothing.

    On exit the handlers are restored and, if the run was asked to stop, `exit_if_requested` is called.

    Args:
        one_press_seconds: Signals within this time count as one.

    Attributes:
        requested: The first signal; None before one arrives.
    """

    only_records = True
    """For `accumulation.interrupts.DelayedInterrupts`: this handler need not be held back within a step."""

    def __init__(self, one_press_seconds: float = _ONE_PRESS_SECONDS) -> None:
        self.requested: int | None = None
        self._requested_at = 0.0
        self._one_press_seconds = one_press_seconds
        self._process = os.getpid()
        self._is_interruptible = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
            handlers = {int(number): signal.getsignal(number) for number in numbers}
            self._previous = {number: it for number, it in handlers.items() if it not in (None, signal.SIG_IGN)}
            for number in self._previous:
                signal.signal(number, self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self:
                signal.signal(number, handler)
        if error is None or isinstance(error, StopRequested):
            self.exit_if_requested()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:
            if number == signal.SIGTERM or self.requested is not None:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            else:
                self.requested = number
        elif self.requested is None:
            self.requested, self._requested_at = number, time.monotonic()
            if self._is_interruptible:
                self._is_interruptible = False
                raise StopRequested(number)
        elif time.monotonic() - self._requested_at >= self._one_press_seconds:
            raise _end_by(number)

    def check(self) -> None:
        """Raise StopRequested, here where the run can stop, if a signal has asked for that."""
        if self.requested is not None:
            raise StopRequested(self.requested)

    def exit_if_requested(self) -> None:
        """End the program as the signal would have, after the last checkpoint; do nothing without a signal.

        A handler that was installed before (of a job that queues itself again, say) is called first.

        Raises:
            KeyboardInterrupt: For SIGINT.
            SystemExit: For the others; its code is 128 plus the number of the signal.
        """
        if self.requested is None:
            return
        handler = self._previous.get(self.requested)
        if callable(handler):
            handler(self.requested, None)
        raise _end_by(self.requested) from None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context that may be left at any moment without loss: waiting for data, evaluating.

        Raises:
            StopRequested: A signal asks or has asked the run to stop. It replaces an error that the signal caused, such
                as that of a worker it ended.
        """
        self.check()
        try:
            self._is_interruptible = True
            yield
        except Exception as error:
            if self.requested is not None:
                raise StopRequested(self.requested) from error
            raise
        finally:
            self._is_interruptible = False
        self.check()


def _end_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
