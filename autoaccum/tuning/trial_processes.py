"""The parent's side of the children that describe and train: a fresh process for each training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autoaccum.devices.child.failures import JobFailed, failure_error
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Request
from autoaccum.devices.device_choice import check_device
from autoaccum.errors import WorkloadError
from autoaccum.tuning.tuning_records import Outcome, ShouldContinue, TuneRequest, WorkloadFacts

_LOAD_SECONDS = 3600.0
"""Limit of loading: anything longer hangs."""


@dataclass(frozen=True, kw_only=True)
class LoadForTuning(Request[str]):
    """Load the workload; the reply is the digest of its source files."""

    reference: str
    options: Mapping[str, Any]
    target_batch: int

    doing = "loading the workload"


@dataclass(frozen=True)
class Describe(Request[WorkloadFacts]):
    """Build what the workload trains, and describe it."""

    doing = "building the workload"


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The loss at a milestone, in percent of the budget; or the outcome, at the end."""

    percent: int = 0
    loss: float = 0.0
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Train(Request[TrainingProgress]):
    """Train with a trial's setting on `budget` samples, up to the first milestone."""

    learning_rate: float
    target_batch: int
    micro_batch: int
    micro_tokens: int | None = None
    evaluation_batch: int
    budget: int
    seed: int

    doing = "training"


@dataclass(frozen=True)
class ContinueTraining(Request[TrainingProgress]):
    """Train up to the next milestone, or end the training here."""

    should_continue: bool

    doing = "training"


@dataclass(frozen=True)
class TrialProcesses:
    """Starts child processes, sends them requests, and ends them.

    Attributes:
        request: What is tuned.
        on_output: Called with each line that the workload prints; None: it goes to stderr.
        digest: The digest of the source files that all trials must have; None until it is known.

    Raises:
        UsageError: There is no such device.
    """

    request: TuneRequest
    on_output: Callable[[str], None] | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        check_device(self.request.options.device)

    def describe(self) -> WorkloadFacts:
        """Load the workload in a child and describe what it trains.

        Raises:
            WorkloadError: The workload cannot be loaded, or cannot be tuned.
            DoesNotFitError: Loading it runs the machine out of memory.
            NotMeasuredError: The process cannot be started, or died.
        """
        try:
            with self._loaded() as process:
                facts = process.call(Describe(), _LOAD_SECONDS)
        except JobFailed as failed:
            raise failure_error(failed.failure, "the machine") from None
        return dataclasses.replace(facts, reference=self.request.reference)

    def train(self, training: Train, should_continue: ShouldContinue) -> Outcome:
        """Train with a trial's setting in a fresh process, which is ended afterwards; a failure becomes an `Outcome`.

        Raises:
            NotMeasuredError: No process can be started.
            WorkloadError: The workload's source files have changed since the study began.
        """
        try:
            with self._loaded() as process:
                progress = process.call(training, math.inf)
                while progress.outcome is None:
                    go_on = should_continue(progress.percent, progress.loss)
                    progress = process.call(ContinueTraining(go_on), math.inf)
                return progress.outcome
        except JobFailed as failed:
            return Outcome.of_failure(failed.failure)

    def check_unchanged(self, digest: str) -> None:
        """Raise WorkloadError if the digest of the loaded source files is not that of the study."""
        if self.digest is not None and digest != self.digest:
            raise WorkloadError(
                f"{self.request.reference} has changed during tuning, so that trials can no longer be compared",
                hint="restore it and continue, or start another study: --study NAME",
            )

    @contextmanager
    def _loaded(self) -> Iterator[ChildProcess]:
        """Yield a new process that has loaded the workload; end it afterwards."""
        load = LoadForTuning(
            reference=self.request.reference,
            options=self.request.options.to_record(),
            target_batch=self.request.target_batches[-1],
        )
        handler = "autoaccum.tuning.trial_training:TuningChild"
        process = ChildProcess(handler, on_output=self.on_output, measured=False)
        try:
            self.check_unchanged(process.call(load, _LOAD_SECONDS))
            yield process
        finally:
            process.close()
