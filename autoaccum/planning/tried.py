"""What the trials of a search have shown so far."""

from __future__ import annotations

from collections.abc import Callable

from autoaccum.devices.base import Trial
from autoaccum.planning.verdicts import doubtful, peak_bytes, trial_error


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
