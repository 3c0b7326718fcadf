"""Roll back an update that failed, and decide, alike on all ranks, whether and how it is repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from autoaccum.accumulation.backpropagation import Backpropagation
from autoaccum.accumulation.out_of_memory import (
    clear_frames,
    find_out_of_memory,
    is_context_dead,
    release_memory,
    shrink,
)
from autoaccum.accumulation.ranks.group import OtherRanksFailed, RankFailure
from autoaccum.accumulation.ranks.sharded import is_of_collective, out_of_memory
from autoaccum.accumulation.step_result import StepObserver, StepPhase, warn_caller
from autoaccum.accumulation.transaction import Transaction
from autoaccum.accumulation.update import Updater
from autoaccum.accumulation.whole_batch.lockstep import NeedsWholeBatch
from autoaccum.errors import DoesNotFitError, RankLostError, UpdateInterrupted, first_line


class Retries:
    """Decides, alike on all ranks, how an update that failed is repeated, or raises its error.

    `join_parts` has the parts of all further updates run in lock step, or refuses that. `add_saver` lets them take less
    memory than they did in a phase that has failed with the least samples, and returns the word of the saver; None if
    there is no other. `failed_in` are the phases in which attempts of the present step ran out of memory.
    """

    def __init__(
        self,
        backpropagation: Backpropagation,
        updater: Updater,
        observer: StepObserver | None,
        join_parts: Callable[[], None],
        *,
        add_saver: Callable[[StepPhase], str | None],
        multiple_of: int,
        recover: bool,
    ) -> None:
        self._backpropagation, self._updater, self._observer = backpropagation, updater, observer
        self._ranks, self._sharded = backpropagation.ranks, backpropagation.sharded
        self._join_parts, self._add_saver = join_parts, add_saver
        self._multiple_of, self._recover = multiple_of, recover
        self.failed_in: list[StepPhase] = []

    def lower(self, ceiling: int, error: BaseException, phase: StepPhase, largest: int, *, unchanged: bool) -> int:
        """Return the most samples of a micro-batch with which to repeat a batch, all of whose tensors are freed.

        That stays at `ceiling` where parts only need each other, or a saver was added; else it is below `largest`, the
        samples of the largest micro-batch. `error` ended the attempt here; the batch is `unchanged` if it is as it was
        before.

        Raises:
            BaseException: The batch cannot be repeated: `error`, or another in its place.
        """
        try:
            if self._sharded is not None and isinstance(error, NeedsWholeBatch):
                self._join_parts()  # It refuses that, on every rank.
            if self._sharded is not None and self._sharded.is_running:  # Its modules are half-way, too.
                self._updater.is_interrupted = True
                if is_of_collective(error):
                    error = self._ranks.explain(error)
            failures = self.report(error, phase, largest, unchanged=unchanged)
            if any(one.needs_whole_batch for one in failures):  # The model called whole_batch: nothing was changed yet.
                self._join_parts()
                clear_frames(error)
                failures = tuple(one for one in failures if not one.needs_whole_batch)
                if not failures:
                    return ceiling
                if isinstance(error, NeedsWholeBatch):
                    error = OtherRanksFailed(failures)
            self.failed_in.append(failures[0].phase)
            saver = self._check(error, failures)
            clear_frames(error)
            is_own = not isinstance(error, OtherRanksFailed)
        finally:
            del error  # the traceback holds this frame
        release_memory(self._backpropagation.device)
        largest, failed_in = max(one.largest for one in failures), self.failed_in[-1]
        lowered = shrink(largest, len(self.failed_in) - 1, self._multiple_of) if saver is None else ceiling
        try:
            if self._observer is None:
                changed = f"in micro-batches of at most {lowered}, and later ones use no more"
                if saver is not None:
                    changed = f"with {saver}, and so are later ones"
                if is_own:
                    warn_caller(
                        f"out of memory ({failed_in}) with micro-batches of {largest}: nothing was changed, the batch"
                        f" is repeated {changed}"
                    )
            elif saver is None:
                self._observer.out_of_memory(failed_in, largest, lowered)
            else:
                self._observer.saver_added(failed_in, largest, saver)
        except Exception as second:  # Warnings may be errors.
            self.report(second)
            raise
        return lowered

    def report(
        self, error: BaseException, phase: StepPhase = "batch", largest: int = 0, *, unchanged: bool = True
    ) -> tuple[RankFailure, ...]:
        """Return the failures of all ranks in this attempt, which hear of this rank's `error`; arguments as `lower`."""
        if isinstance(error, OtherRanksFailed):
            return error.failures
        if isinstance(error, RankLostError):
            raise error
        oom = None if isinstance(error, UpdateInterrupted) else find_out_of_memory(error)
        kind: Literal["certain", "uncertain"] | None = None
        if oom is not None and self._recover:
            kind = "certain" if oom.certain else "uncertain"
        text = f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")
        needs = isinstance(error, NeedsWholeBatch)
        failure = RankFailure(self._ranks.rank, text, phase, largest, kind, unchanged, needs)
        try:
            is_waited_for = self._sharded is not None and self._sharded.is_running
            return (self._ranks.store_failure if is_waited_for else self._ranks.report_failure)(failure)
        except RankLostError:  # This rank's own error says more.
            raise error from None
        finally:
            del error  # the traceback holds this frame

    def _check(self, error: BaseException, failures: Sequence[RankFailure]) -> str | None:
        """Raise `error`, or another in its place, unless the batch can be repeated: in smaller parts, or with a saver.

        All ranks decide alike, from the same `failures`. Returns the word of the saver, if one was added.
        """
        try:
            is_own = not isinstance(error, OtherRanksFailed)
            fatal = [one for one in failures if one.out_of_memory is None]
            if not all(one.unchanged for one in failures):
                if is_own and not fatal:
                    warn_caller("memory ran out, and forward has changed the batch in place: it cannot be repeated")
                fatal = list(failures)
            if fatal:
                raise error if any(one.rank == self._ranks.rank for one in fatal) else fatal[0].as_error()
            # An update's memory does not depend on the micro-batch: a first failure may be fragmentation, two are not.
            is_update = self.failed_in[-2:] == ["update", "update"]
            largest = max(one.largest for one in failures)
            if largest > self._multiple_of and not is_update:
                if self._sharded is None:
                    return None
                raise out_of_memory(failures[0], shrink(largest, 0, self._multiple_of)) from error
            if self._sharded is None and (saver := self._add_saver(self.failed_in[-1])) is not None:
                return saver
            if not any(one.out_of_memory == "certain" for one in failures):
                raise error if is_own else failures[0].as_error()
            clear_frames(error)
            where = "" if self._ranks.size == 1 else f" on rank {failures[0].rank}"
            if is_update:
                raise DoesNotFitError(
                    f"the update runs out of memory{where}, whatever the micro-batch",
                    hint="free memory on the device, or use an optimizer with less state",
                ) from error
            least = "one sample" if self._multiple_of == 1 else f"{self._multiple_of} samples"
            raise DoesNotFitError(
                f"not even {least} at a time fits: out of memory ({self.failed_in[-1]}{where})",
                hint="free memory on the device, shorten the samples, or lower the precision",
            ) from error
        finally:
            del error  # the traceback holds this frame


def roll_back(transaction: Transaction, updater: Updater, error: BaseException) -> BaseException:
    """Restore the state and return `error`, or UpdateInterrupted if that fails."""
    if isinstance(error, UpdateInterrupted) or updater.is_interrupted:
        return error
    if is_context_dead(error):
        updater.is_interrupted = True
        return error
    try:
        try:
            transaction.rollback()
        except KeyboardInterrupt as interrupt:
            transaction.rollback()
            return interrupt
    except Exception as second:
        updater.is_interrupted = True
        interrupted = UpdateInterrupted(
            f"a step failed, and the state before it could not be restored ({type(second).__name__}: {second})",
            hint="load a checkpoint and make a new Accumulator",
        )
        interrupted.__cause__ = error
        return interrupted
    return error
