"""How a run is asked to stop: by a signal, which waits for where nothing is half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_ONE_PRESS_SECONDS = 0.5


class StopRequested(BaseException):
    """A run is asked to stop; no `Exception`, so that nobody's `except Exception` eats it.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopSignals:
    """Within it SIGINT, SIGTERM and SIGHUP ask the run to stop; one that was ignored before (nohup) stays ignored.

    A first signal is noted, nothing more: `check` raises where the run can be left. Within `interruptible` it raises
    at once. Outside of that nothing is raised by a signal, so neither an update nor a checkpoint is ever cut in two. A
    second signal acts at once: KeyboardInterrupt or SystemExit, after which nothing should be written. One that follows
    within half a second is no second one: timeout(1), a closed terminal and wrappers of all kinds send it to the
    process and to its group.

    Forked children inherit handlers: there SIGTERM ends the process as ever, and of the others, which a terminal sends
    to the whole group, the first is left to the parent, which ends its workers. Signals are the main thread's: in
    others nothing is taken.

    Leaving it puts the handlers back and, where the run was asked to stop, calls `leave`.

    Args:
        one_press_seconds: Within how many seconds signals are one.

    Attributes:
        asked: The first signal that came; None until one does.
    """

    only_records = True
    """For `accumulation.interrupts`: this handler need not be held back within a step."""

    def __init__(self, one_press_seconds: float = _ONE_PRESS_SECONDS) -> None:
        self.asked: int | None = None
        self._asked_at = 0.0
        self._one_press_seconds = one_press_seconds
        self._process = os.getpid()
        self._is_open = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
            handlers = {int(number): signal.getsignal(number) for number in numbers}
            self._previous = {number: it for number, it in handlers.items() if it not in (None, signal.SIG_IGN)}
            for number in self._previous:
                signal.signal(number, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self:
                signal.signal(number, handler)
        if error is None or isinstance(error, StopRequested):
            self.leave()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:
            self._end_child(number)
        elif self.asked is None:
            self.asked, self._asked_at = number, time.monotonic()
            if self._is_open:
                self._is_open = False
                raise StopRequested(number)
        elif time.monotonic() - self._asked_at >= self._one_press_seconds:
            raise _end_by(number)

    def check(self) -> None:
        """Leave the run here if it was asked to stop.

        Raises:
            StopRequested: It was.
        """
        if self.asked is not None:
            raise StopRequested(self.asked)

    def leave(self) -> None:
        """End the program as the signal would have, after the last checkpoint; nothing if none came.

        A handler that was there before (a job's, which has itself queued again) is called first.

        Raises:
            KeyboardInterrupt: SIGINT came.
            SystemExit: Another did; its code is 128 and the number of the signal.
        """
        if self.asked is None:
            return
        handler = self._previous.get(self.asked)
        if callable(handler):
            handler(self.asked, None)
        raise _end_by(self.asked) from None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where nothing is lost by leaving at any moment: waiting for data, evaluating.

        Raises:
            StopRequested: The run is asked to stop, or was before; also in place of an error that came with it, such as
                that of a worker which the same signal ended.
        """
        self.check()
        try:
            self._is_open = True
            yield
        except Exception as error:
            if self.asked is not None:
                raise StopRequested(self.asked) from error
            raise
        finally:
            self._is_open = False
        self.check()

    def _end_child(self, number: int) -> None:
        if number != signal.SIGTERM and self.asked is None:
            self.asked = number
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
