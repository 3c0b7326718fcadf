"""Searches for the largest size that runs, in few trials: pure decisions over functions that run one trial."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from autoaccum.devices.base import Trial
from autoaccum.errors import NotMeasuredError
from autoaccum.messages import Message, message
from autoaccum.planning import next_size
from autoaccum.planning.next_size import CorrectedForecast, Estimate, Predict, choose_size, estimate_from_peaks
from autoaccum.planning.plan_messages import (
    MemoryNeeds,
    does_not_fit_error,
    peak_bytes,
    refuted_by,
    trial_error,
    uncertain_oom_error,
)

Stop = Literal["time", "trials"]
"""The limit that ended a search before it knew the largest size."""

_MAX_ESTIMATED_TRIALS = 12
"""After this many trials estimates are ignored, and the bracket is halved."""
_FLAT = 1.01
"""Two peaks whose ratio is at most this count as equal."""
_PROBABLE = 0.5
"""A size is tried in a fresh process at once if it is the answer with more than this probability."""
_UNSURE = 0.1
"""A failure that was this probable to run may be due to what other trials left in the process."""


class SearchStopped(Exception):
    """Raised by a trial that a limit forbids: `stop` is the kind of limit, and the text names it."""

    def __init__(self, stop: Stop, text: str) -> None:
        super().__init__(text)
        self.stop: Stop = stop


class RunTrial(Protocol):
    """A function that runs one trial."""

    def __call__(self, size: int, *, fresh: bool, unlimited: bool) -> Trial:
        """Run a trial at `size` samples, in a `fresh` process or any; `unlimited`: whatever the limits are.

        Raises:
            SearchStopped: A limit forbids the trial, or ended it.
        """


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        size: The size of the answer, in samples.
        trial: The trial that confirmed it: it ran, in a fresh process where there are processes.
        largest_fit: The largest size that ran, in samples; without the allocator's retries, if any size ran so.
        first_fail: The smallest larger size that failed (or ran only with retries); None if none did.
        capped: The search ended because the largest size worth trying ran, not because memory ran out.
        trials: All trials, in the order they ran.
        warnings: Warnings for the plan.
        notes: Notes of those who asked for the search.
        stopped: The limit that ended the search early; sizes between `largest_fit` and `first_fail` may fit.
    """

    size: int
    trial: Trial
    largest_fit: int
    first_fail: int | None
    capped: bool
    trials: tuple[Trial, ...]
    warnings: tuple[Message, ...] = ()
    notes: tuple[Message, ...] = ()
    stopped: Stop | None = None

    def proved_by(self, trial: Trial) -> SearchResult:
        """Return the result that another trial confirms."""
        return dataclasses.replace(self, trial=trial, trials=(*self.trials, trial))


def search(
    trial: RunTrial,
    sizes: Sequence[int],
    *,
    limit_bytes: int,
    needs: MemoryNeeds | None = None,
    predict: Predict | None = None,
    known: Sequence[Trial] = (),
    answer: Callable[[int], int] | None = None,
    from_largest: bool = False,
    probes_first: bool = False,
) -> SearchResult:
    """Find the largest of `sizes` that runs, by running it and, unless it is the last, a larger one that fails.

    Where memory does not grow monotonically with the size, the answer still ran and a larger size still failed; other
    sizes are not ruled out. A `tight` size counts as failed as soon as an `ok` one is known.

    Args:
        trial: Runs one trial.
        sizes: The sizes worth trying, in samples, in ascending order; the first is the least that can be trained.
        limit_bytes: The budget of every trial.
        needs: What is known of the memory of any size, for the error message and the first estimate. Where trials are
            predicted, earlier trials leave nothing behind that a failure could be due to.
        predict: The predicted peak in bytes at a size of at least 2 samples. It decides where the search starts and
            goes while trials confirm it, never where it ends.
        known: Trials of these sizes that were run before.
        answer: Returns the size that the plan uses if the given one is the largest that fits, and the same for that
            again. None: the largest of `sizes` that is not above it.
        from_largest: Begin with the largest size, as where trials of small ones take long: they run all their parts.
        probes_first: Run the first trial in a used process, which takes less time, unless it is probably the answer.

    Raises:
        DoesNotFitError: The smallest size ran out of memory.
        WorkloadError: A trial raised an error of the workload.
        NotMeasuredError: A trial raised an error of the measurement, or failed with an uncertain out-of-memory error
            and no smaller size ran in a fresh process; or the search was stopped before any size had run.
    """
    found = _Search(
        trial,
        sizes,
        limit_bytes,
        needs or MemoryNeeds(),
        None if predict is None else CorrectedForecast(predict, limit_bytes, sizes[-1]),
        answer or (lambda size: sizes[bisect_right(sizes, size) - 1]),
        from_largest,
        probes_first,
    )
    for trial_before in known:
        found.keep(trial_before)
    return found.find_largest()


@dataclass
class _Search:
    """The trials of a search, and what follows from all of them together; the arguments are those of `search`."""

    trial: RunTrial
    sizes: Sequence[int]
    limit_bytes: int
    needs: MemoryNeeds
    forecast: CorrectedForecast | None
    answer: Callable[[int], int]
    from_largest: bool
    probes_first: bool
    trials: list[Trial] = field(default_factory=list)
    tried_fresh: set[int] = field(default_factory=set)
    refuted: int | None = None
    stop: SearchStopped | None = None
    data_ends: tuple[Message, ...] = ()

    def find_largest(self) -> SearchResult:
        """Return the result of `search`."""
        sizes, refuted = self.sizes, list[Message]()
        while True:
            try:
                if self.stop is None:
                    self.narrow_down()
            except SearchStopped as stop:
                self.stop = stop
            largest = self.largest_fit
            if largest < sizes[0] and self.stop is not None:
                raise NotMeasuredError(
                    f"{self.stop} ended the search before {self.needs.quantity} {sizes[0]} had run through",
                    hint="allow more, or take a smaller model",
                )
            if largest < sizes[0] or self.answer(largest) < sizes[0]:
                raise does_not_fit_error(self.trials[-1], self.limit_bytes, self.needs)
            size = self.answer(largest)
            confirmed, uncertain = self.confirmation(size), self.uncertain_failure
            if confirmed is not None and uncertain is None:
                return self.result(size, confirmed, refuted)
            final = self.run(size, fresh=True, unlimited=True)
            if final.outcome == "error":
                continue
            if not self.fits(final):
                refuted.append(refuted_by(final, largest, predicted=self.needs.predicted))
                self.refute(final)
            elif uncertain is not None and self.uncertain_failure is not None:
                raise uncertain_oom_error(uncertain, self.needs)

    def result(self, size: int, confirmed: Trial, refuted: Sequence[Message]) -> SearchResult:
        largest, first_fail, stop = self.largest_fit, self.first_fail, self.stop
        capped = largest == self.sizes[-1]
        warnings = [*refuted, *self.data_ends]
        if any(t.outcome == "tight" and t.micro_batch == largest for t in self.trials):
            warnings.append(message("tight", size=largest, predicted=self.needs.predicted))
        if stop is not None and not capped:
            warnings.append(message("stopped", limit=str(stop), largest_fit=largest, first_fail=first_fail))
        return SearchResult(
            size=size,
            trial=confirmed,
            largest_fit=largest,
            first_fail=None if capped else first_fail,
            capped=capped,
            trials=tuple(self.trials),
            warnings=tuple(warnings),
            stopped=None if stop is None or capped else stop.stop,
        )

    def narrow_down(self) -> None:
        """Run trials until no size is left between the largest that ran and the first that failed."""
        widening = 1.0
        while True:
            sizes, (low, high) = self.sizes, self.bracket
            estimate = (self.forecast.estimate(self.peaks) if self.forecast else None) or self.estimate()
            if low + 1 == high:
                if not self.may_be_leftovers(estimate):
                    return
                self.run(sizes[high], fresh=True)
                continue
            if len(self.trials) >= _MAX_ESTIMATED_TRIALS:
                size = sizes[(low + high) // 2]
            else:
                wide = None if estimate is None else estimate.widened(widening)
                between, first_fail = sizes[low + 1 : high], self.first_fail
                size = choose_size(between, self.largest_fit, first_fail, wide, from_largest=self.from_largest)
            trial = self.run(size, fresh=self.is_run_fresh(size, high, estimate))
            if estimate is not None:
                widening = estimate.widen(widening, size, fits=self.fits(trial))

    def is_run_fresh(self, size: int, high: int, estimate: Estimate | None) -> bool:
        """Return whether a fresh process runs the trial of a size, where `high` is the index of the first that failed.

        It does where the trial probably ends the search: a success is then confirmed, a failure not repeated.
        """
        if self.needs.predicted or estimate is None:
            return self.leftovers_matter
        if size > estimate.ceiling:
            is_unsure = not self.needs.grants_leftovers and estimate.probability(size) > _UNSURE
            return self.leftovers_matter or is_unsure
        index = bisect_left(self.sizes, size)
        if self.probes_first and not self.trials:
            larger = estimate.probability(self.sizes[index + 1]) if index + 1 < high else 0.0
            return estimate.probability(size) - larger > _PROBABLE
        next_fails = index + 1 == high or self.sizes[index + 1] > estimate.ceiling
        # The process of the inspection has more memory than others: what it imported does not count any more.
        return self.leftovers_matter or next_fails or not any(t.fresh for t in self.trials)

    def run(self, size: int, *, fresh: bool, unlimited: bool = False) -> Trial:
        """Run a trial and keep it; raises as `keep`."""
        trial = self.trial(size, fresh=fresh, unlimited=unlimited)
        if fresh or trial.fresh:
            self.tried_fresh.add(size)
        return self.keep(trial)

    def keep(self, trial: Trial) -> Trial:
        """Keep a trial; raise if it ended by an error, or by an uncertain out-of-memory error of the smallest size.

        If the data was too little for its size, the sizes that need more than there is are left out instead.
        """
        self.trials.append(trial)
        if trial.outcome == "error":
            most = trial.most_samples or 0
            if most < self.sizes[0]:
                raise trial_error(trial, of_command=self.needs.of_command)
            self.sizes, self.refuted = self.sizes[: bisect_right(self.sizes, most)], most + 1
            self.data_ends = (message("data_ends", size=trial.micro_batch, largest=self.sizes[-1]),)
        if not trial.ran and not trial.is_definite_oom and trial.micro_batch <= self.sizes[0]:
            raise uncertain_oom_error(trial, self.needs)
        return trial

    def refute(self, trial: Trial) -> None:
        """Leave out the size of a trial that failed from a clean state, and larger ones; raise for the least size."""
        if trial.micro_batch > self.sizes[0]:
            self.refuted = trial.micro_batch
            return
        if trial.outcome == "oom" and not trial.is_definite_oom:
            raise NotMeasuredError(
                f"{self.needs.quantity} {trial.micro_batch} ran and failed: {trial.message or 'no message'}"
            )
        raise does_not_fit_error(trial, self.limit_bytes, self.needs)

    def fits(self, trial: Trial) -> bool:
        """Return whether the trial counts as one that fits: a `tight` one only as long as no other trial is `ok`."""
        return trial.outcome == "ok" or (trial.outcome == "tight" and all(t.outcome != "ok" for t in self.trials))

    @property
    def largest_fit(self) -> int:
        """The largest size that ran, below any that was refuted; 0 when none has."""
        ran = {trial.micro_batch for trial in self.decisive if self.fits(trial)}
        return max((size for size in ran if self.refuted is None or size < self.refuted), default=0)

    @property
    def first_fail(self) -> int | None:
        """The smallest size above `largest_fit` that failed; None when none did."""
        largest = self.largest_fit
        ended = (t for t in self.decisive if t.outcome != "error" and not self.fits(t))
        failed = (t.micro_batch for t in ended if largest < t.micro_batch <= self.sizes[-1])
        return min(failed, default=None)

    @property
    def bracket(self) -> tuple[int, int]:
        """The indices of the largest of `sizes` that fits, and of the smallest that does not; -1 or the end if none."""
        first_fail = self.first_fail
        high = len(self.sizes) if first_fail is None else bisect_left(self.sizes, first_fail)
        return min(bisect_right(self.sizes, self.largest_fit), high) - 1, high

    @property
    def leftovers_matter(self) -> bool:
        """True if a size that failed in a used process, or a larger one, ran in a fresh one."""
        refuted = [t.micro_batch for t in self.trials if not t.fresh and not t.ran]
        ran = [t.micro_batch for t in self.trials if t.fresh and t.ran]
        return not self.needs.predicted and bool(refuted) and max(ran, default=0) >= min(refuted)

    def may_be_leftovers(self, estimate: Estimate | None) -> bool:
        """Return whether the first failure came from a used process and is none that the estimate expects."""
        first_fail, (_, high) = self.first_fail, self.bracket
        if self.needs.predicted or first_fail is None:
            return False
        if any(first_fail <= size <= self.sizes[high] for size in self.tried_fresh):
            return False
        return estimate is None or estimate.probability(first_fail) > _UNSURE

    def confirmation(self, size: int) -> Trial | None:
        """Return the trial that confirmed `size`, in a fresh process; None if there is none."""
        ran = [t for t in self.decisive if t.micro_batch == size and self.fits(t)]
        return ran[0] if ran and ran[0].fresh else None

    @property
    def uncertain_failure(self) -> Trial | None:
        """The smallest failure that may be a bug, if no smaller size ran in a fresh process."""
        uncertain = [t for t in self.decisive if not t.ran and not t.is_definite_oom]
        if not uncertain:
            return None
        failure = min(uncertain, key=lambda t: t.micro_batch)
        fresh = [t for t in self.trials if t.fresh]
        return None if any(t.ran and t.micro_batch < failure.micro_batch for t in fresh) else failure

    def estimate(self) -> Estimate | None:
        """Return where memory probably reaches the limit, by the peaks, or at first by the inspection's update."""
        peaks, needs = self.peaks, self.needs
        if needs.curved:
            return next_size.estimate_by_curve(peaks, self.limit_bytes, self.sizes)
        # A peak that does not grow with the batch is the optimizer's.
        is_flat = max(peaks.values(), default=0) <= (needs.update_bytes or 0) * _FLAT
        # Under a limit on trials or time, bisect once one has failed and none has run.
        if needs.sample_bytes and (peaks or self.probes_first or not self.trials):
            if needs.resident_bytes is not None and is_flat:
                peaks = {0: needs.resident_bytes}
            elif needs.update_bytes is not None and not peaks:
                peaks = {needs.update_samples: needs.update_bytes}
        return estimate_from_peaks(peaks, self.limit_bytes, sample_bytes=needs.sample_bytes)

    @property
    def decisive(self) -> list[Trial]:
        """The trial that counts of each size: the last one in a fresh process, or else the last.

        Where leftovers matter, failures of used processes do not count.
        """
        found: dict[int, Trial] = {}
        for trial in self.trials:
            if self.leftovers_matter and not (trial.ran or trial.fresh):
                continue
            known = found.get(trial.micro_batch)
            if known is None or trial.fresh or not known.fresh:
                found[trial.micro_batch] = trial
        return list(found.values())

    @property
    def peaks(self) -> dict[int, int]:
        """Peak bytes by size, of sizes that fit; over a curve also of those that are predicted not to."""
        counts_all = self.needs.curved and self.needs.predicted
        ran = [(t.micro_batch, peak_bytes(t)) for t in self.trials if counts_all or self.fits(t)]
        return {size: peak for size, peak in ran if peak is not None}
