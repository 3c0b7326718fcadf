"""Searches for the largest size that runs, in few trials: pure decisions over a function that runs one trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from autoaccum.devices.base import Trial
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.planning.next_size import CorrectedForecast, Predict, next_size
from autoaccum.planning.plan_messages import (
    MemoryNeeds,
    does_not_fit_error,
    non_monotonic_warnings,
    peak_bytes,
    stop_warning,
    tight_warning,
    trial_error,
    uncertain_oom_error,
)

Stop = Literal["time", "trials"]
"""The limit that ended a search before it knew the largest size."""

_MAX_FAILED_FORECASTS = 2
"""The number of forecast sizes that may fail before the search starts with the smallest size."""


class SearchStopped(Exception):
    """Raised by a trial that a limit forbids; the text names the limit.

    Attributes:
        stop: The kind of limit.
    """

    def __init__(self, stop: Stop, text: str) -> None:
        super().__init__(text)
        self.stop: Stop = stop


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        largest_fit: The largest size that ran, in samples; without the allocator's retries, if any size ran so.
        first_fail: The next size, which failed (or ran only with retries); None when `capped`. After a `stopped`
            search, the smallest larger size that failed, if any.
        capped: The search ended because `largest_fit` is the cap, not because memory ran out.
        trials: All trials, in the order they ran.
        warnings: Sentences for the plan.
        stopped: The limit that ended the search early; sizes between `largest_fit` and `first_fail` may fit.
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
    needs: MemoryNeeds | None = None,
    least_size: int = 1,
    multiple_of: int = 1,
    fresh_trial: Callable[[int], Trial] | None = None,
    predict: Predict | None = None,
) -> SearchResult:
    """Find the largest size up to `cap` that runs, by running it and, unless it is the cap, the next one.

    Where memory does not grow monotonically with the size, the result still ran and the next size still failed;
    larger sizes are not ruled out, and a warning says so where the trials show it. A `tight` size counts as failed as
    soon as an `ok` one is known. No size is tried twice, except to confirm an uncertain out-of-memory error, or the
    last failure if its process had run trials before: what they left behind may have caused it.

    Args:
        trial: Runs one trial at a size in samples, or raises SearchStopped.
        cap: The largest size worth trying, in samples.
        limit_bytes: The budget of every trial.
        needs: What is known of the memory of any size, for the error message and the first steps.
        least_size: The smallest size that can be trained at all, in samples.
        multiple_of: Try only multiples of this number; `cap` and `least_size` are multiples too.
        fresh_trial: Runs the same trial in a process that has run none before. None where all trials share one
            process: an uncertain failure then counts once a smaller size has run after it.
        predict: The predicted peak in bytes at a size of at least 2 samples. It decides where the search starts and
            goes while trials confirm it, never where it ends.

    Raises:
        UsageError: `cap` is less than `least_size`.
        DoesNotFitError: The smallest size ran out of memory.
        WorkloadError: A trial raised an error of the workload.
        NotMeasuredError: A trial raised an error of the measurement, or failed with an uncertain out-of-memory error
            and no smaller size ran in a fresh process; or the search was stopped before any size had run.
    """
    if cap < least_size:
        raise UsageError(
            f"the largest micro-batch to try is {cap}, the least that can be trained is {least_size}",
            hint="give a larger one",
        )
    history = TrialHistory(trial, fresh_trial, least_size)
    forecast = None if predict is None else CorrectedForecast(predict, limit_bytes, cap)
    bounds = _Bounds(cap, limit_bytes, needs, forecast, multiple_of)
    stop: SearchStopped | None = None
    try:
        _run_first_size(history, bounds, least_size)
        _narrow_down(history, bounds)
        while history.first_fail_is_stale:
            history.run(history.largest_fit + multiple_of, fresh=True)
            _narrow_down(history, bounds)
        history.confirm_uncertain_failures()
    except SearchStopped as raised:
        stop = raised
    if not any(t.ran for t in history.trials):
        raise NotMeasuredError(
            f"{stop} ended the search before a micro-batch of {least_size} had run through",
            hint="allow more, or take a smaller model",
        )
    capped = history.largest_fit == cap
    return SearchResult(
        largest_fit=history.largest_fit,
        first_fail=None if capped else history.first_fail,
        capped=capped,
        trials=tuple(history.trials),
        warnings=(
            *_warnings(history, None if capped else stop, needs),
            *non_monotonic_warnings(history.valid_trials),
        ),
        stopped=None if stop is None or capped else stop.stop,
    )


def _warnings(history: TrialHistory, stop: SearchStopped | None, needs: MemoryNeeds | None) -> Iterator[str]:
    predicted = needs is not None and needs.predicted
    if any(t.outcome == "tight" and t.micro_batch == history.largest_fit for t in history.trials):
        yield tight_warning(history.largest_fit, predicted=predicted)
    if stop is not None:
        yield stop_warning(str(stop), history.largest_fit, history.first_fail)


@dataclass(frozen=True)
class _Bounds:
    """The bounds of a search: the largest size, the budget, what is known beforehand, and the step between sizes."""

    cap: int
    limit_bytes: int
    needs: MemoryNeeds | None
    forecast: CorrectedForecast | None
    step: int

    def round_down(self, size: int, history: TrialHistory) -> int:
        """Return the multiple at or below `size`, kept between the largest size that fits and the first that fails."""
        first_fail = self.cap + self.step if history.first_fail is None else history.first_fail
        return max(history.largest_fit + self.step, min(size - size % self.step, first_fail - self.step))


def _run_first_size(history: TrialHistory, bounds: _Bounds, least_size: int) -> None:
    """Run a first size: one that probably fits by the forecast, or else the smallest.

    Raises:
        DoesNotFitError: The smallest size does not run.
    """
    while bounds.forecast is not None and len(history.trials) < _MAX_FAILED_FORECASTS:
        smallest_fail = min((t.micro_batch for t in history.trials if not t.ran), default=None)
        guess = bounds.forecast.next_size({}, 0, smallest_fail, widening=1.0, trials=0)
        size = 0 if guess is None else min(guess.size, bounds.cap) // bounds.step * bounds.step
        if size <= least_size:
            break
        if history.run(size).ran:
            return
    if not history.run(least_size).ran:
        raise does_not_fit_error(history.trials[-1], bounds.limit_bytes, bounds.needs)


def _narrow_down(history: TrialHistory, bounds: _Bounds) -> None:
    """Run trials until the largest size that ran is the cap, or the next one failed."""
    widening = 1.0
    sample_bytes = None if bounds.needs is None else bounds.needs.sample_bytes
    while history.largest_fit < bounds.cap and history.first_fail != history.largest_fit + bounds.step:
        guess, trials = None, len(history.trials)
        tried = history.peaks, history.largest_fit, history.first_fail
        if bounds.forecast is not None:
            guess = bounds.forecast.next_size(*tried, widening=widening, trials=trials)
        # The trial that probably ends the search runs in a fresh process: a failure in a used one would be repeated.
        ends_it = guess is not None and bounds.round_down(guess.size, history) == history.largest_fit + bounds.step
        guess = guess or next_size(
            *tried, bounds.limit_bytes, widening=widening, trials=trials, sample_bytes=sample_bytes
        )
        size = bounds.round_down(guess.size, history)
        history.run(size, fresh=ends_it or history.leftovers_matter)
        widening = guess.widen(widening, fits=size <= history.largest_fit)


class TrialHistory:
    """Runs the trials of a search, and answers questions about all of them together.

    Args:
        trial: Runs one trial at a size in samples.
        fresh_trial: Runs it in a process that has run none before; None where all trials share one process.
        least_size: The smallest size that can be trained.
    """

    def __init__(
        self, trial: Callable[[int], Trial], fresh_trial: Callable[[int], Trial] | None, least_size: int
    ) -> None:
        self._trial, self._fresh_trial, self._least_size = trial, fresh_trial, least_size
        self.trials: list[Trial] = []

    def run(self, size: int, *, fresh: bool = False) -> Trial:
        """Run a trial, in a fresh process on request, and keep it.

        Raises:
            WorkloadError, NotMeasuredError: It ended by an error; or the smallest size failed with an uncertain
                out-of-memory error.
        """
        trial = (self._fresh_trial or self._trial)(size) if fresh else self._trial(size)
        self.trials.append(trial)
        if trial.outcome == "error":
            raise trial_error(trial)
        if not trial.ran and not trial.certain and size == self._least_size:
            raise uncertain_oom_error(trial)
        return trial

    def fits(self, trial: Trial) -> bool:
        """Return whether the trial counts as one that fits: a `tight` one only as long as no other trial is `ok`."""
        return trial.outcome == "ok" or (trial.outcome == "tight" and all(t.outcome != "ok" for t in self.trials))

    @property
    def largest_fit(self) -> int:
        """The largest size that fits."""
        return max(t.micro_batch for t in self.trials if self.fits(t))

    @property
    def first_fail(self) -> int | None:
        """The smallest size above `largest_fit` that does not fit; None when none was tried."""
        failed = [t.micro_batch for t in self.valid_trials if not self.fits(t) and t.micro_batch > self.largest_fit]
        return min(failed, default=None)

    @property
    def valid_trials(self) -> list[Trial]:
        """The trials that count: where leftovers matter, failures of used processes do not."""
        return [t for t in self.trials if t.ran or t.fresh] if self.leftovers_matter else self.trials

    @property
    def leftovers_matter(self) -> bool:
        """True if a size that failed in a used process ran in a fresh one."""
        refuted = {t.micro_batch for t in self.trials if not t.fresh and not t.ran}
        return any(t.fresh and t.ran and t.micro_batch in refuted for t in self.trials)

    @property
    def first_fail_is_stale(self) -> bool:
        """True if the failure right above the largest fit comes only from one process that had run trials before."""
        tried = [t for t in self.trials if t.micro_batch == self.first_fail]
        return self._fresh_trial is not None and len(tried) == 1 and not tried[0].fresh

    @property
    def peaks(self) -> dict[int, int]:
        """Peak bytes by size, of sizes that fit."""
        ran = [(t.micro_batch, peak_bytes(t)) for t in self.trials if self.fits(t)]
        return {size: peak for size, peak in ran if peak is not None}

    def confirm_uncertain_failures(self) -> None:
        """Run the largest fit again if failures may be bugs: some messages mean either that or out of memory.

        Such a failure counts once a smaller size ran in a fresh process.

        Raises:
            NotMeasuredError: No smaller size did.
        """
        uncertain = [t for t in self.trials if not t.ran and not t.certain]
        if not uncertain:
            return
        smallest = min(uncertain, key=lambda t: t.micro_batch)
        if not self._is_confirmed(smallest):
            # After a failed trial the next process is a fresh one, so that this trial can confirm it.
            self.run(self.largest_fit, fresh=True)
        if not self._is_confirmed(smallest):
            raise uncertain_oom_error(smallest)

    def _is_confirmed(self, failure: Trial) -> bool:
        later = self.trials[self.trials.index(failure) + 1 :] if self._fresh_trial is None else []
        fresh = [trial for trial in self.trials if trial.fresh]
        return any(trial.ran and trial.micro_batch < failure.micro_batch for trial in (*fresh, *later))
