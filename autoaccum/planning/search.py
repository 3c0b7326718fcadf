"""The largest size that ran, in few trials: pure decisions over a `trial(size)` that somebody else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from autoaccum.devices.base import Trial
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.extrapolation import Forecast, Guess, Predict, next_size
from autoaccum.planning.plan_messages import (
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
    multiple_of: int = 1,
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
        multiple_of: Only multiples of so many samples are tried; `cap` and `least_size` are some.
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
    tried = Tried(trial, fresh_trial, least_size)
    forecast = None if predict is None else Forecast(predict, limit_bytes, cap)
    goal = _Goal(cap, limit_bytes, need, forecast, multiple_of)
    stop: SearchStopped | None = None
    try:
        _begin(tried, goal, least_size)
        _close_in(tried, goal)
        while tried.first_fail_is_stale:
            tried.run(tried.largest_fit + multiple_of, fresh=True)
            _close_in(tried, goal)
        tried.settle_doubts()
    except SearchStopped as raised:
        stop = raised
    if not any(t.ran for t in tried.trials):
        raise NotMeasuredError(
            f"{stop} ended the search before a micro-batch of {least_size} had run through",
            hint="allow more, or take a smaller model",
        )
    capped = tried.largest_fit == cap
    return SearchResult(
        largest_fit=tried.largest_fit,
        first_fail=None if capped else tried.first_fail,
        capped=capped,
        trials=tuple(tried.trials),
        warnings=(*_warnings(tried, None if capped else stop, need), *monotony_warnings(tried.telling)),
        stopped=None if stop is None or capped else stop.stop,
    )


def _warnings(tried: Tried, stop: SearchStopped | None, need: Need | None) -> Iterator[str]:
    predicted = need is not None and need.predicted
    if any(t.outcome == "tight" and t.micro_batch == tried.largest_fit for t in tried.trials):
        yield tight_warning(tried.largest_fit, predicted=predicted)
    if stop is not None:
        yield stop_warning(str(stop), tried.largest_fit, tried.first_fail)


@dataclass(frozen=True)
class _Goal:
    """Up to where which sizes are tried, in how much memory, and what is known beforehand."""

    cap: int
    limit_bytes: int
    need: Need | None
    forecast: Forecast | None
    step: int

    def whole(self, size: int, tried: Tried) -> int:
        """The multiple at or below `size`, or what is next to it between what fits and what does not."""
        first_fail = self.cap + self.step if tried.first_fail is None else tried.first_fail
        return max(tried.largest_fit + self.step, min(size - size % self.step, first_fail - self.step))


def _begin(tried: Tried, goal: _Goal, least_size: int) -> None:
    """Run one size: one of which a forecast says that it probably fits, or else the least.

    Raises:
        DoesNotFitError: The least does not run.
    """
    while goal.forecast is not None and len(tried.trials) < _FORECAST_FAILS:
        guess = goal.forecast.guess({}, 0, tried.least_fail, surprise=1.0, tried=0)
        size = 0 if guess is None else min(guess.size, goal.cap) // goal.step * goal.step
        if size <= least_size:
            break
        if tried.run(size).ran:
            return
    if not tried.run(least_size).ran:
        raise does_not_fit(tried.trials[-1], goal.limit_bytes, goal.need)


def _close_in(tried: Tried, goal: _Goal) -> None:
    """Run trials until the largest that ran is the cap, or has a failure right above it."""
    surprise = 1.0
    while tried.largest_fit < goal.cap and tried.first_fail != tried.largest_fit + goal.step:
        guess = None
        if goal.forecast is not None:
            guess = goal.forecast.guess(
                tried.peaks, tried.largest_fit, tried.first_fail, surprise=surprise, tried=len(tried.trials)
            )
        # What will probably end the search is to count at once: a failure in a used process is tried again.
        ends_it = guess is not None and goal.whole(guess.size, tried) == tried.largest_fit + goal.step
        guess = guess or _extrapolate(tried, goal, surprise)
        size = goal.whole(guess.size, tried)
        tried.run(size, fresh=ends_it or tried.leftovers_matter)
        surprise = guess.surprise(size <= tried.largest_fit, surprise)


def _extrapolate(tried: Tried, goal: _Goal, surprise: float) -> Guess:
    return next_size(
        tried.peaks,
        tried.largest_fit,
        tried.first_fail,
        goal.limit_bytes,
        surprise=surprise,
        tried=len(tried.trials),
        sample_bytes=None if goal.need is None else goal.need.sample_bytes,
    )


class Tried:
    """Runs the trials of a search, and tells what they mean together.

    Args:
        trial: Runs one at a size in samples.
        fresh_trial: The same in a process that has run none; None where all share one process.
        least_size: The smallest size that can be trained.
    """

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
        """Whether it counts as one that fits: a `tight` one only as long as no other does."""
        return trial.outcome == "ok" or (trial.outcome == "tight" and all(t.outcome != "ok" for t in self.trials))

    @property
    def largest_fit(self) -> int:
        """The largest size that fits."""
        return max(t.micro_batch for t in self.trials if self.fits(t))

    @property
    def first_fail(self) -> int | None:
        """The smallest size above it that does not; None when none was tried."""
        failed = [t.micro_batch for t in self.telling if not self.fits(t) and t.micro_batch > self.largest_fit]
        return min(failed, default=None)

    @property
    def least_fail(self) -> int | None:
        """The smallest size that did not run."""
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
        """Peak bytes by size, of sizes that fit."""
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
