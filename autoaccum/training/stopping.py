"""What stops a training: signals, and what its ranks tell each other so that all begin, go on and end alike.

Ranks talk through `Ranks.gather`, at the same points in the same order. A rank that fails, or is asked to stop, tells
the others in place of its next value (`TrainingRanks.report`), and all of them end at the same update.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from autoaccum.accumulation.ranks.group import ONE_RANK, OtherRanksFailed, RankFailure, Ranks
from autoaccum.accumulation.ranks.replicated import copy_from_first
from autoaccum.errors import AutoaccumError, RankFailedError, RankLostError, UsageError, describe_error

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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

    On exit the handlers are restored. If the run was asked to stop, the program then ends as the signal would have
    ended it, with KeyboardInterrupt or a SystemExit of 128 plus the signal; a handler that was there before (of a job
    that queues itself again, say) is called first.

    Args:
        one_press_seconds: Signals within this time count as one.

    Attributes:
        requested: The first signal; None before one arrives.
    """

    only_records = True
    """For `accumulation.step_result.DelayedInterrupts`: this handler need not be held back within a step."""

    def __init__(self, one_press_seconds: float = _ONE_PRESS_SECONDS) -> None:
        self.requested: int | None = None
        self._requested_at = 0.0
        self._one_press_seconds = one_press_seconds
        self._process = os.getpid()
        self._is_interruptible = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
            self._previous = {number: it for number, it in handlers.items() if it not in (None, signal.SIG_IGN)}
            for number in self._previous:
                signal.signal(number, self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self:
                signal.signal(number, handler)
        if self.requested is not None and (error is None or isinstance(error, StopRequested)):
            if callable(handler := self._previous.get(self.requested)):
                handler(self.requested, None)
            raise _end_by(self.requested) from None

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


@dataclass(frozen=True)
class Stopping(RankFailure):
    """Told in place of a failure by a rank that a signal asked to stop."""

    number: int = signal.SIGTERM


class TrainingRanks:
    """The ranks of one training, or this process alone.

    Attributes:
        rank: The number of this rank, from 0.
        size: The number of ranks.
        is_first: Whether this is rank 0, which writes the run folder and shows the progress.
        gather: Returns the values that the ranks give, in their order; each calls it at the same point (see `Ranks`).
    """

    def __init__(self, ranks: Ranks = ONE_RANK) -> None:
        self._ranks, self.rank, self.size, self.gather = ranks, ranks.rank, ranks.size, ranks.gather
        self.is_first, self._has_reported = ranks.rank == 0, False

    def by_first(self, make: Callable[[], _T]) -> _T | None:
        """Return on all ranks what `make` returns on rank 0, or raise what it raises there."""
        if self.size == 1:
            return make()
        answer: _T | AutoaccumError | None = None
        if self.is_first:
            try:
                answer = make()
            except AutoaccumError as error:
                answer = error.with_traceback(None)
        answer = self.gather(answer)[0]
        if isinstance(answer, AutoaccumError):
            raise answer
        return answer

    def report(
        self, error: BaseException, signals: StopSignals | None = None, *, is_known: bool = False
    ) -> BaseException:
        """Report the error that ends this rank to the others, unless they know of it; return the error to raise here.

        An exit that the user's code or a second signal asked for is not told: the others see that this rank is gone.
        """
        has_reported, self._has_reported = self._has_reported, True
        if isinstance(error, OtherRanksFailed):
            return _meaning(error, signals)
        is_told = has_reported or is_known or isinstance(error, RankFailedError | RankLostError)
        if not is_told and isinstance(error, Exception | StopRequested):
            failure = RankFailure(self.rank, describe_error(error))
            if isinstance(error, StopRequested):
                failure = Stopping(self.rank, failure.text, number=error.number)
            with suppress(RankLostError):  # This rank's own error says more.
                self._ranks.report_failure(failure)
        return error

    @contextmanager
    def ending(self, signals: StopSignals | None = None) -> Iterator[None]:
        """Report an error in here to the other ranks, or raise theirs."""
        try:
            yield
        except BaseException as error:
            if (other := self.report(error, signals)) is not error:
                raise_other(other)
            del other  # Its traceback holds this frame.
            raise

    def agree_on_window(self, window: object, wants_stop: bool) -> bool:
        """Return whether a rank wants to stop.

        Args:
            window: The samples and the checksum of the next window.
            wants_stop: Whether a callback of this rank wants to end the training.

        Raises:
            UsageError: The ranks do not read the same data in the same order.
        """
        answers = self.gather((window, wants_stop))
        if any(of_rank for _, of_rank in answers):
            return True
        if any(of_rank != answers[0][0] for of_rank, _ in answers):
            raise UsageError(
                "the ranks do not read the same samples in the same order",
                hint="let the data and its sampler draw from the generators of Python, NumPy or torch, and give all"
                " samples to every rank: fit deals them itself",
            )
        return False

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the `tensors` of rank 0, except those that cannot be sent."""
        sent = [tensor for tensor in tensors if not (tensor.is_meta or tensor.is_quantized)]
        copy_from_first(self._ranks, [(f"tensor {number}", tensor) for number, tensor in enumerate(sent)])


def raise_other(error: BaseException) -> NoReturn:
    """Raise `error` in place of the one that is being handled."""
    try:
        raise error from None
    finally:
        del error  # Its traceback holds this frame.


def _meaning(told: OtherRanksFailed, signals: StopSignals | None) -> BaseException:
    """Return what to raise on a rank that has been told of other ranks' failures."""
    stopping = [failure.number for failure in told.failures if isinstance(failure, Stopping)]
    if len(stopping) < len(told.failures):
        return next(failure for failure in told.failures if not isinstance(failure, Stopping)).as_error()
    if signals is not None and signals.requested is None:
        signals.requested = stopping[0]
    return StopRequested(stopping[0])
