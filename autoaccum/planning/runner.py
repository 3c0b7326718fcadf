"""Runs a plan's trials on a device, keeps them, and tells of them."""

from __future__ import annotations

from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Device, Trial
from autoaccum.planning.allowance import Allowance
from autoaccum.planning.events import Listener, TrialFinished, TrialStarted
from autoaccum.planning.request import Request


class Runner:
    """Runs trials on `device` as `request` asks for, as long as `allowance` lets it.

    Attributes:
        trials: All trials so far, in order.
        proof_seconds: What to keep of the time for a confirmation, without its trial: the start of a process.
    """

    def __init__(self, device: Device, request: Request, tell: Listener, allowance: Allowance) -> None:
        self._device, self._request, self._tell, self._allowance = device, request, tell, allowance
        self.trials: list[Trial] = []
        self.proof_seconds = 0.0

    def try_size(self, size: int, *, fresh: bool = False) -> Trial:
        """A trial of the search: two micro-batches of `size` samples.

        Raises:
            SearchStopped: It may not be run, or the limit on time ended it.
        """
        ran = [trial.seconds for trial in self.trials if trial.ran]
        proof = self.proof_seconds + max(ran) if ran else 0.0
        left = self._allowance.seconds_left(len(self.trials), proof)
        # The whole share is one micro-batch per update: nothing accumulates then.
        parts = (size,) if size == self._request.share else (size, size)
        trial = self._run(parts, fresh=fresh, limit_seconds=left)
        if trial.timed_out and left is not None:
            self._allowance.seconds_left(None, proof)
        return trial

    def confirm(self, schedule: Schedule) -> Trial:
        """Run what tells of the schedule from a clean state, unless the last trial did just that.

        No limit ends it: nothing is reported that did not run (`Schedule.trial_parts`).
        """
        parts = schedule.trial_parts
        last = self.trials[-1]
        if last.fresh and last.outcome == "ok" and last.parts == parts:
            return last
        return self._run(parts, fresh=True, confirming=True)

    def try_budget(self, parts: tuple[int, ...], limit_bytes: int) -> Trial:
        """Run `parts` from a clean state, held to `limit_bytes`.

        Raises:
            SearchStopped: The limit on time ended it, or does not let it begin.
        """
        left = self._allowance.seconds_left(None, 0.0)
        trial = self._run(parts, fresh=True, limit_bytes=limit_bytes, limit_seconds=left)
        if trial.timed_out and left is not None:
            self._allowance.seconds_left(None, 0.0)
        return trial

    def _run(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool,
        confirming: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        number = len(self.trials) + 1
        self._tell(TrialStarted(number, parts, confirming, limit_bytes))
        trial = self._device.trial(parts, fresh=fresh, limit_bytes=limit_bytes, limit_seconds=limit_seconds)
        self.trials.append(trial)
        self._tell(TrialFinished(number, trial, confirming))
        return trial
