"""The parent's side of the children that describe and train: a fresh process for each training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from autoaccum.devices.child.failures import ChildDied, JobFailed, death_error, failure_error
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.errors import WorkloadError
from autoaccum.planning.device_choice import check_device
from autoaccum.tuning.tuning_records import (
    ContinueTraining,
    Describe,
    FinalState,
    LoadForTuning,
    Outcome,
    Setting,
    Train,
    TuneRequest,
    WorkloadFacts,
)

_LEAVE_SECONDS = 5.0
"""A finished child may exit by itself, so that the workload's exit handlers run."""
_MOST_SECONDS = 3600.0
"""Limit of loading: anything longer hangs."""


class TrialProcesses:
    """Starts child processes, sends them requests, and ends them.

    Args:
        on_output: Called with each line that the workload prints; None: it goes to stderr.

    Raises:
        UsageError: There is no such device.
    """

    def __init__(self, request: TuneRequest, on_output: Callable[[str], None] | None = None) -> None:
        check_device(request.options.device)
        self.request, self._on_output = request, on_output
        self._digest: str | None = None

    def describe(self) -> WorkloadFacts:
        """Load the workload in a child and describe what it trains.

        Raises:
            WorkloadError: The workload cannot be loaded, or cannot be tuned.
            DoesNotFitError: Loading it runs the machine out of memory.
            NotMeasuredError: The process cannot be started, or died.
        """
        process = self._start()
        try:
            _call(process, self._load())
            facts = _call(process, Describe())
        finally:
            process.end(grace_seconds=_LEAVE_SECONDS)
        self._digest = facts.digest
        return facts

    def train(
        self,
        setting: Setting,
        budget: int,
        seed: int,
        evaluation_batch: int,
        should_continue: Callable[[int, float], bool],
    ) -> Outcome:
        """Train in a fresh process, which is ended afterwards; a failure in it becomes an `Outcome`.

        At each milestone `should_continue` gets the percent of the budget and the loss, and returns whether to
        continue.

        Raises:
            NotMeasuredError: No process can be started.
            WorkloadError: The workload's source files have changed since the study began.
        """
        limit = self.request.options.trial_limit or math.inf
        deadline = time.monotonic() + limit
        train = Train(setting=setting, budget=budget, seed=seed, evaluation_batch=evaluation_batch)
        process = self._start()

        def call(request: Request[Reply]) -> Reply:
            return process.call(request, max(0.0, deadline - time.monotonic()))

        try:
            self.check_unchanged(call(self._load()))
            progress = call(train)
            while progress.outcome is None:
                go_on = should_continue(progress.percent, progress.loss)
                progress = call(ContinueTraining(should_continue=go_on))
            return progress.outcome
        except JobFailed as failed:
            failure = failed.failure
            state: FinalState = "out_of_memory" if failure.outcome == "oom" else "failed"
            return Outcome(state=state, reason=failure.message, user_traceback=failure.traceback)
        except ChildDied as death:
            reason = f"its process {death}"
            if death.kind == "limit":
                reason = f"it took longer than a trial may ({limit:g} s), and was ended"
            return Outcome(state="out_of_memory" if death.out_of_memory else "failed", reason=reason)
        finally:
            process.end(grace_seconds=_LEAVE_SECONDS)

    def check_unchanged(self, digest: str) -> None:
        """Raise WorkloadError if the digest of the loaded source files is not that of the study."""
        if self._digest is not None and digest != self._digest:
            raise WorkloadError(
                f"{self.request.reference} has changed during tuning, so that trials can no longer be compared",
                hint="restore it and continue, or start another study: --study NAME",
            )

    def _load(self) -> LoadForTuning:
        return LoadForTuning(
            paths=ImportPaths.of(),
            reference=self.request.reference,
            options=self.request.options.to_record(),
            target_batch=self.request.target_batch.high,
        )

    def _start(self) -> ChildProcess:
        return ChildProcess("autoaccum.tuning.tuning_child", on_output=self._on_output, measured=False)


def _call(process: ChildProcess, request: Request[Reply]) -> Reply:
    """Call a child before any trial, where a failure ends the study."""
    try:
        return process.call(request, _MOST_SECONDS)
    except ChildDied as death:
        raise death_error(death, request.doing, _MOST_SECONDS) from None
    except JobFailed as failed:
        raise failure_error(failed.failure, "the machine") from None
