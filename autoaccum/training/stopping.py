"""How a run is asked to stop: by a signal, which waits for where nothing is half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_ONE_PRESS_SECONDS = 0.5

_Handler = Callable[[int, FrameType | None], Any]


class StopAsked(BaseException):
    """A run is asked to stop; no `Exception`, so that nobody's `except Exception` eats it.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stopping:
    """Within it SIGINT, SIGTERM and SIGHUP ask the run to stop; one that was ignored before (nohup) stays ignored.

    A first signal is noted, nothing more: `check` raises where the run can be left. Within `interruptible` it raises
    at once. Outside of that nothing is raised by a signal, so neither an update nor a checkpoint is ever cut in two;
    what torch raises when a worker of a DataLoader dies waits for the next wait for data as well. A second signal
    acts at once: KeyboardInterrupt or SystemExit, after which nothing should be written. One that follows within half
    a second is no second one: timeout(1), a closed terminal and wrappers of all kinds send it to the process and to
    its group.

    Forked children inherit handlers: there SIGTERM ends the process as ever, and of the others, which a terminal sends
    to the whole group, the first is left to the parent, which ends its workers. End them within this, so that torch
    misses none of them later. Signals are the main thread's: in others nothing is taken.

    Leaving it puts the handlers back and, where the run was asked to stop, calls `leave`.

    Args:
        one_press_seconds: Within how many seconds signals are one.

    Attributes:
        asked: The first signal that came; None until one does.
    """

    only_notes = True
    """For `accumulation.interrupts`: this handler need not be held back within a step."""

    def __init__(self, one_press_seconds: float = _ONE_PRESS_SECONDS) -> None:
        self.asked: int | None = None
        self._asked_at = 0.0
        self._one_press_seconds = one_press_seconds
        self._process = os.getpid()
        self._is_taken = self._is_open = False
        self._previous: dict[int, Any] = {}
        self._on_child: _Handler | None = None
        self._child_ended = False

    def __enter__(self) -> Stopping:
        self._is_taken = threading.current_thread() is threading.main_thread()
        if self._is_taken:
            numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
            handlers = {int(number): signal.getsignal(number) for number in numbers}
            self._previous = {number: it for number, it in handlers.items() if it not in (None, signal.SIG_IGN)}
            for number in self._previous:
                signal.signal(number, self)
            self._hold_children()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self:
                signal.signal(number, handler)
        if self._on_child is not None and signal.getsignal(signal.SIGCHLD) == self._child:
            signal.signal(signal.SIGCHLD, self._on_child)
        if error is None or isinstance(error, StopAsked):
            self.leave()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:
            self._end_child(number)
        elif self.asked is None:
            self.asked, self._asked_at = number, time.monotonic()
            if self._is_open:
                self._is_open = False
                raise StopAsked(number)
        elif time.monotonic() - self._asked_at >= self._one_press_seconds:
            raise _end_by(number)

    def check(self) -> None:
        """Leave the run here if it was asked to stop.

        Raises:
            StopAsked: It was.
        """
        if self.asked is not None:
            raise StopAsked(self.asked)

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
            StopAsked: The run is asked to stop, or was before; also in place of an error that came with it, such as
                that of a worker which the same signal ended.
        """
        self.check()
        try:
            self._open()
            yield
        except Exception as error:
            if self.asked is not None:
                raise StopAsked(self.asked) from error
            raise
        finally:
            self._close()
        self.check()

    def _open(self) -> None:
        self._is_open = True
        if self._child_ended and self._on_child is not None:
            self._child_ended = False
            self._on_child(int(signal.SIGCHLD), None)

    def _close(self) -> None:
        self._is_open = False
        if self._is_taken:
            self._hold_children()

    def _hold_children(self) -> None:
        """Stand in front of the handler of SIGCHLD: torch's raises wherever the main thread happens to be."""
        if hasattr(signal, "SIGCHLD"):
            handler = signal.getsignal(signal.SIGCHLD)
            if callable(handler) and handler != self._child:
                self._on_child = handler
                signal.signal(signal.SIGCHLD, self._child)

    def _child(self, number: int, frame: FrameType | None) -> None:
        if self._on_child is not None and (self._is_open or os.getpid() != self._process):
            self._on_child(number, frame)
        else:
            self._child_ended = True

    def _end_child(self, number: int) -> None:
        if number != signal.SIGTERM and self.asked is None:
            self.asked = number
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
