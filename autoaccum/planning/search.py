"""The largest size that ran, in few trials: pure decisions over a `trial(size)` that somebody else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from autoaccum.devices.base import Trial
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.extrapolation import Guess, next_size
from autoaccum.planning.forecast import Forecast, Predict
from autoaccum.planning.verdicts import (
    Need,
    does_not_fit,
    doubtful,
    monotony_warnings,
    peak_bytes,
    stop_warning,
    tight_warning,
    trial_error,
)

Stop = Literal["time", "trials"]
"""Which limit ended a search before it knew the largest size."""


_FORECAST_FAILS = 2
"""How many sizes a forecast may promise in vain before the search begins with the least one."""


class SearchStopped(Exception):
    """What a trial raises when it may not be run any more; its text names the limit.

    Attributes:
        stop: Which one it is.
    """

    def __init__(self, stop: Stop, text: str) -> None:
        super().__init__(text)
        self.stop: Stop = stop


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Where a search ended.

    Attributes:
        largest_fit: The largest size that ran, in samples; it ran without the allocator's retries if any did.
        first_fail: The next size, which did not (or only with retries); None when `capped`. Where the search was
            `stopped`, the smallest above that did not, if any.
        capped: The search ended because `largest_fit` is the cap, not because memory did.
        trials: All trials, in the order they ran.
        warnings: Sentences for the plan.
        stopped: What ended the search early; sizes between `largest_fit` and `first_fail` may fit.
    """

    largest_fit: int
    first_fail: int | None
    capped: bool
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...] = ()
    stopped: Stop | None = None


def search(
    trial: Callable[[int], Trial],
    cap: int,
    *,
    limit_bytes: int,
    need: Need | None = None,
    least_size: int = 1,
    fresh_trial: Callable[[int], Trial] | None = None,
    predict: Predict | None = None,
) -> SearchResult:
    """Find the largest size up to `cap` that runs, by running it and, unless it is the cap, the next one.

    Where memory is not monotone in the size, the answer still ran and the next size still failed; sizes above that
    were not ruled out, and a warning says so where the trials show it. A `tight` size counts as failed as soon as an
    `ok` one is known. No size is tried twice, except to confirm a doubtful out-of-memory, or the last failure when its
    process had run trials before, whose leftovers may have been what failed.

    Args:
        trial: Runs one trial at a size in samples, or raises SearchStopped.
        cap: The largest size worth trying, in samples.
        limit_bytes: The budget of every trial.
        need: What is known of the memory any size needs, for the message and for the first steps.
        least_size: The smallest size that can be trained at all, in samples.
        fresh_trial: The same in a process that has run no trial, for what leftovers may have decided. None where all
            trials share one process: a doubtful failure then counts once a smaller size has run after it.
        predict: The peak in bytes that somebody predicts for a size of at least 2 samples. It decides where the search
            begins and goes as long as trials bear it out, never where it ends.

    Raises:
        UsageError: `cap` is less than `least_size`.
        DoesNotFitError: The smallest size ran out of memory.
        WorkloadError: A trial failed by the workload's fault.
        NotMeasuredError: A trial failed by the measurement's fault, or with a doubtful out-of-memory and no smaller
            size that runs in a fresh process; or the search was stopped before any size had run.
    """
    if cap < least_size:
        raise UsageError(
            f"the largest micro-batch to try is {cap}, the least that can be trained is {least_size}",
            hint="give a larger one",
        )
    state = _State(trial, fresh_trial, least_size)
    goal = _Goal(cap, limit_bytes, need, None if predict is None else Forecast(predict, limit_bytes, cap))
    stop: SearchStopped | None = None
    try:
        _begin(state, goal, least_size)
        _close_in(state, goal)
        while state.first_fail_is_stale:
            state.run(state.largest_fit + 1, fresh=True)
            _close_in(state, goal)
        state.settle_doubts()
    except SearchStopped as raised:
        stop = raised
    if not any(t.ran for t in state.trials):
        raise NotMeasuredError(
            f"{stop} ended the search before a micro-batch of {least_size} had run through",
            hint="allow more, or take a smaller model",
        )
    capped = state.largest_fit == cap
    return SearchResult(
        largest_fit=state.largest_fit,
        first_fail=None if capped else state.first_fail,
        capped=capped,
        trials=tuple(state.trials),
        warnings=(*_warnings(state, None if capped else stop), *monotony_warnings(state.telling)),
        stopped=None if stop is None or capped else stop.stop,
    )


def _warnings(state: _State, stop: SearchStopped | None) -> Iterator[str]:
    tight = sorted({t.micro_batch for t in state.trials if t.outcome == "tight"})
    if tight:
        yield tight_warning(tight, state.largest_fit)
    if stop is not None:
        yield stop_warning(str(stop), state.largest_fit, state.first_fail)


@dataclass(frozen=True)
class _Goal:
    """Up to where sizes are tried, in how much memory, and what is known beforehand."""

    cap: int
    limit_bytes: int
    need: Need | None
    forecast: Forecast | None


def _begin(state: _State, goal: _Goal, least_size: int) -> None:
    """Run one size: one of which a forecast says that it probably fits, or else the least.

    Raises:
        DoesNotFitError: The least does not run.
    """
    while goal.forecast is not None and len(state.trials) < _FORECAST_FAILS:
        guess = goal.forecast.guess({}, 0, state.least_fail, surprise=3.0 ** len(state.trials), tried=0)
        size = 0 if guess is None else min(guess.size, goal.cap)
        if size <= least_size:
            break
        if state.run(size).ran:
            return
    if not state.run(least_size).ran:
        raise does_not_fit(state.trials[-1], goal.limit_bytes, goal.need)


def _close_in(state: _State, goal: _Goal) -> None:
    """Run trials until the largest that ran is the cap, or has a failure right above it."""
    surprise = 1.0
    while state.largest_fit < goal.cap and state.first_fail != state.largest_fit + 1:
        guess = None
        if goal.forecast is not None:
            guess = goal.forecast.guess(
                state.peaks, state.largest_fit, state.first_fail, surprise=surprise, tried=len(state.trials)
            )
        # What will probably end the search is to count at once: a failure in a used process is tried again.
        ends_it = guess is not None and guess.size == state.largest_fit + 1
        guess = guess or _extrapolate(state, goal, surprise)
        size = min(guess.size, goal.cap)
        state.run(size, fresh=ends_it or state.leftovers_matter)
        surprise = guess.surprise(size <= state.largest_fit, surprise)


def _extrapolate(state: _State, goal: _Goal, surprise: float) -> Guess:
    return next_size(
        state.peaks,
        state.largest_fit,
        state.first_fail,
        goal.limit_bytes,
        surprise=surprise,
        tried=len(state.trials),
        sample_bytes=None if goal.need is None else goal.need.sample_bytes,
    )


class _State:
    """What the trials so far have shown."""

    def __init__(
        self, trial: Callable[[int], Trial], fresh_trial: Callable[[int], Trial] | None, least_size: int
    ) -> None:
        self._trial, self._fresh_trial, self._least_size = trial, fresh_trial, least_size
        self.trials: list[Trial] = []

    def run(self, size: int, *, fresh: bool = False) -> Trial:
        """Run a trial; what ran beside leftovers of others runs without them, what failed may be tried again."""
        trial = (self._fresh_trial or self._trial)(size) if fresh else self._trial(size)
        self.trials.append(trial)
        if trial.outcome == "error":
            raise trial_error(trial)
        if not trial.ran and not trial.certain and size == self._least_size:
            raise doubtful(trial)
        return trial

    def fits(self, trial: Trial) -> bool:
        return trial.outcome == "ok" or (trial.outcome == "tight" and all(t.outcome != "ok" for t in self.trials))

    @property
    def largest_fit(self) -> int:
        return max(t.micro_batch for t in self.trials if self.fits(t))

    @property
    def first_fail(self) -> int | None:
        failed = [t.micro_batch for t in self.telling if not self.fits(t) and t.micro_batch > self.largest_fit]
        return min(failed, default=None)

    @property
    def least_fail(self) -> int | None:
        return min((t.micro_batch for t in self.trials if not t.ran), default=None)

    @property
    def telling(self) -> list[Trial]:
        """The trials that tell something: failures of used processes do not where leftovers matter."""
        return [t for t in self.trials if t.ran or t.fresh] if self.leftovers_matter else self.trials

    @property
    def leftovers_matter(self) -> bool:
        """Whether a size ran in a fresh process that failed in a used one."""
        refuted = {t.micro_batch for t in self.trials if not t.fresh and not t.ran}
        return any(t.fresh and t.ran and t.micro_batch in refuted for t in self.trials)

    @property
    def first_fail_is_stale(self) -> bool:
        """Whether the failure right above what ran is known only from one process that had run trials before."""
        tried = [t for t in self.trials if t.micro_batch == self.first_fail]
        return self._fresh_trial is not None and len(tried) == 1 and not tried[0].fresh

    @property
    def peaks(self) -> dict[int, int]:
        ran = [(t.micro_batch, peak_bytes(t)) for t in self.trials if self.fits(t)]
        return {size: peak for size, peak in ran if peak is not None}

    def settle_doubts(self) -> None:
        """Some texts of an out-of-memory also mean a bug: they count once a smaller size ran in a fresh process."""
        doubts = [t for t in self.trials if not t.ran and not t.certain]
        if not doubts:
            return
        least = min(doubts, key=lambda t: t.micro_batch)
        if not self._is_settled(least):
            # After a failed trial the next process is a fresh one, so that this trial can settle it.
            self.run(self.largest_fit, fresh=True)
        if not self._is_settled(least):
            raise doubtful(least)

    def _is_settled(self, doubt: Trial) -> bool:
        later = self.trials[self.trials.index(doubt) + 1 :] if self._fresh_trial is None else []
        fresh = [trial for trial in self.trials if trial.fresh]
        return any(trial.ran and trial.micro_batch < doubt.micro_batch for trial in (*fresh, *later))
