"""The largest size that ran, in few trials: pure decisions over a `trial(size)` that somebody else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from autoaccum.devices.base import Trial
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.planning.extrapolation import next_size
from autoaccum.units import MIB, format_bytes

_FALLS_BY = 0.02
_CLOSE = 0.9
_LESS_MEMORY = "a smaller model, --precision bf16, activation checkpointing, or more memory"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Where a search ended.

    Attributes:
        largest_fit: The largest size that ran, in samples; it ran without the allocator's retries if any did.
        first_fail: The next size, which did not (or only with retries); None when `capped`.
        capped: The search ended because `largest_fit` is the cap, not because memory did.
        trials: All trials, in the order they ran.
        warnings: Sentences for the plan.
    """

    largest_fit: int
    first_fail: int | None
    capped: bool
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is known of a workload's memory before any trial.

    Attributes:
        least_bytes: What any size holds: the parameters.
        update_bytes: The peak of one update of `update_samples` samples that nothing limited; None: not measured.
    """

    least_bytes: int = 0
    update_bytes: int | None = None
    update_samples: int = 0


def search(
    trial: Callable[[int], Trial],
    cap: int,
    *,
    limit_bytes: int,
    need: Need | None = None,
    least_size: int = 1,
    fresh_trial: Callable[[int], Trial] | None = None,
) -> SearchResult:
    """Find the largest size up to `cap` that runs, by running it and, unless it is the cap, the next one.

    Where memory is not monotone in the size, the answer still ran and the next size still failed; sizes above that
    were not ruled out, and a warning says so where the trials show it. A `tight` size counts as failed as soon as an
    `ok` one is known. No size is tried twice, except to confirm a doubtful out-of-memory, or the last failure when its
    process had run trials before, whose leftovers may have been what failed.

    Args:
        trial: Runs one trial at a size in samples.
        cap: The largest size worth trying, in samples.
        limit_bytes: The budget of every trial.
        need: What is known of the memory any size needs, for the message.
        least_size: The smallest size that can be trained at all, in samples.
        fresh_trial: The same in a process that has run no trial; used close to the limit.

    Raises:
        UsageError: `cap` is less than `least_size`.
        DoesNotFitError: The smallest size ran out of memory.
        WorkloadError: A trial failed by the workload's fault.
        NotMeasuredError: A trial failed by the measurement's fault, or with a doubtful out-of-memory and no smaller
            size that runs in a fresh process.
    """
    if cap < least_size:
        raise UsageError(
            f"the largest micro-batch to try is {cap}, the least that can be trained is {least_size}",
            hint="give a larger one",
        )
    state = _State(trial, fresh_trial)
    if not state.run(least_size).ran:
        raise does_not_fit(state.trials[0], limit_bytes, need)
    _close_in(state, cap, limit_bytes)
    while state.first_fail_is_stale:
        state.run(state.largest_fit + 1, close=True)
        _close_in(state, cap, limit_bytes)
    state.settle_doubts()
    capped = state.largest_fit == cap
    return SearchResult(
        largest_fit=state.largest_fit,
        first_fail=None if capped else state.first_fail,
        capped=capped,
        trials=tuple(state.trials),
        warnings=(*_tight_warnings(state), *monotony_warnings(state.trials)),
    )


def _close_in(state: _State, cap: int, limit_bytes: int) -> None:
    """Run trials until the largest that ran is the cap, or has a failure right above it."""
    surprise = 1.0
    while state.largest_fit < cap and state.first_fail != state.largest_fit + 1:
        guess = next_size(
            state.peaks,
            state.largest_fit,
            state.first_fail,
            limit_bytes,
            surprise=surprise,
            tried=len(state.trials),
        )
        size = min(guess.size, cap)
        may_fail = guess.promised is not None and size >= _CLOSE * guess.promised
        state.run(size, close=may_fail or state.first_fail is not None)
        surprise = guess.surprise(size <= state.largest_fit, surprise)


class _State:
    """What the trials so far have shown."""

    def __init__(self, trial: Callable[[int], Trial], fresh_trial: Callable[[int], Trial] | None) -> None:
        self._trial, self._fresh_trial = trial, fresh_trial
        self.trials: list[Trial] = []

    def run(self, size: int, *, close: bool = False) -> Trial:
        """Run a trial; one close to the limit in a process without leftovers of others."""
        trial = (self._fresh_trial or self._trial)(size) if close else self._trial(size)
        self.trials.append(trial)
        if trial.outcome == "error":
            raise trial_error(trial)
        if not trial.ran and not trial.certain and not any(t.ran and t.micro_batch < size for t in self.trials):
            raise _doubtful(trial)
        return trial

    def fits(self, trial: Trial) -> bool:
        return trial.outcome == "ok" or (trial.outcome == "tight" and all(t.outcome != "ok" for t in self.trials))

    @property
    def largest_fit(self) -> int:
        return max(t.micro_batch for t in self.trials if self.fits(t))

    @property
    def first_fail(self) -> int | None:
        failed = [t.micro_batch for t in self.trials if not self.fits(t) and t.micro_batch > self.largest_fit]
        return min(failed, default=None)

    @property
    def first_fail_is_stale(self) -> bool:
        """Whether the failure right above what ran is known only from one process that had run trials before."""
        tried = [t for t in self.trials if t.micro_batch == self.first_fail]
        return self._fresh_trial is not None and len(tried) == 1 and not tried[0].fresh

    @property
    def peaks(self) -> dict[int, int]:
        ran = [(t.micro_batch, _peak(t)) for t in self.trials if self.fits(t)]
        return {size: peak for size, peak in ran if peak is not None}

    def settle_doubts(self) -> None:
        """Some texts of an out-of-memory also mean a bug: they count once a smaller size ran in a fresh process."""
        doubtful = [t for t in self.trials if not t.ran and not t.certain]
        if not doubtful:
            return
        least = min(doubtful, key=lambda t: t.micro_batch)
        if not self._ran_fresh_below(least.micro_batch):
            # After a failed trial the next process is a fresh one, so that this trial can settle it.
            self.run(self.largest_fit, close=True)
        if not self._ran_fresh_below(least.micro_batch):
            raise _doubtful(least)

    def _ran_fresh_below(self, size: int) -> bool:
        return any(t.ran and t.fresh and t.micro_batch < size for t in self.trials)


def trial_error(trial: Trial) -> AutoaccumError:
    """The error to raise for a trial whose outcome is `error`: the workload's fault, or the measurement's."""
    where = f" in {trial.phase}" if trial.phase else ""
    message = f"micro-batch {trial.micro_batch} failed{where}: {trial.message or 'no message'}"
    if trial.blames == "user":
        return WorkloadError(message, user_traceback=trial.traceback)
    return NotMeasuredError(message)


def does_not_fit(trial: Trial, limit_bytes: int, need: Need | None = None) -> DoesNotFitError:
    """The clear no for the smallest trial that ran out of memory: bytes needed, bytes there, what to do.

    A trial that failed has no peak of its own: what an unlimited update took says what is needed, else what it held
    when it failed and the parameters are lower bounds.
    """
    need = need or Need()
    held, there = _peak(trial), f"{format_bytes(limit_bytes)} are there"
    known = max(held or 0, need.least_bytes)
    where = f" in {trial.phase}" if trial.phase else ""
    if need.update_bytes is not None and need.update_bytes > limit_bytes and trial.phase != "batch":
        samples = "1 sample" if need.update_samples == 1 else f"{need.update_samples} samples"
        message = (
            f"micro-batch {trial.micro_batch} ran out of memory{where}: one update of {samples} takes "
            f"{format_bytes(need.update_bytes)} where nothing limits it, {there}"
        )
    elif known > limit_bytes:
        message = f"micro-batch {trial.micro_batch} needs at least {format_bytes(known)}, {there}"
    else:
        so_far = f" with {format_bytes(held)} taken" if held else ""
        message = f"micro-batch {trial.micro_batch} needs more memory than there is, {there}: it ran out{where}{so_far}"
    if trial.phase == "batch":
        hint = "a trial holds the effective batch: take a smaller --target-batch, smaller samples, or more memory"
    else:
        hint = f"take {_LESS_MEMORY}"
    return DoesNotFitError(message, hint=hint)


def monotony_warnings(trials: Iterable[Trial]) -> list[str]:
    """Sentences on memory that does not grow with the size; none where it does."""
    ordered = sorted(trials, key=lambda t: t.micro_batch)
    found = []
    ran = {t.micro_batch for t in ordered if t.ran}
    failed = [t.micro_batch for t in ordered if t.outcome == "oom" and t.micro_batch not in ran]
    above = [size for size in sorted(ran) if failed and size > failed[0]]
    if above:
        found.append(
            f"memory is not monotone here: size {above[0]} ran although size {failed[0]} did not, so that other sizes "
            "may not do what their neighbours did"
        )
    measured = [(t.micro_batch, peak) for t in ordered if t.ran and (peak := _peak(t)) is not None]
    for (size, peak), (larger, less) in pairwise(measured):
        if larger > size and less < peak * (1 - _FALLS_BY) - 2 * MIB:
            found.append(
                f"memory is not monotone here: the peak falls from {format_bytes(peak)} at size {size} to "
                f"{format_bytes(less)} at size {larger}, so that a larger size than was tried may fit"
            )
            break
    return found


def _tight_warnings(state: _State) -> list[str]:
    tight = sorted({t.micro_batch for t in state.trials if t.outcome == "tight"})
    if not tight:
        return []
    if state.largest_fit in tight:
        return [f"micro-batch {state.largest_fit} ran only because the allocator released its cache and tried again"]
    return [f"size {tight[0]} ran only because the allocator released its cache and tried again: it was not chosen"]


def _doubtful(trial: Trial) -> NotMeasuredError:
    return NotMeasuredError(
        f"micro-batch {trial.micro_batch} failed with a message that may mean a lack of memory or a bug, and no "
        f"smaller size ran in a fresh process: {trial.message or 'no message'}"
    )


def _peak(trial: Trial) -> int | None:
    return trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes
