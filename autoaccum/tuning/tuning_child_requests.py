"""Requests to a child that describes, times or trains a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Request
from autoaccum.tuning.tune_request import Budget
from autoaccum.tuning.tuning_result import Outcome, Setting, WorkloadFacts


@dataclass(frozen=True, kw_only=True)
class LoadForTuning(Request[str]):
    """Load the workload; the reply is the digest of its source files."""

    paths: ImportPaths
    reference: str
    options: Mapping[str, Any]
    target_batch: int

    doing = "loading the workload"


@dataclass(frozen=True)
class Describe(Request[WorkloadFacts]):
    """Build what the workload trains, and describe it."""

    doing = "building the workload"


@dataclass(frozen=True, kw_only=True)
class TimeUpdate(Request[float]):
    """Make an update; the reply is how many seconds it took."""

    micro_batch: int

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"an update in micro-batches of {self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The loss at a milestone, in percent of the budget; or the outcome, at the end."""

    percent: int = 0
    loss: float = 0.0
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Train(Request[TrainingProgress]):
    """Train up to the first milestone."""

    setting: Setting
    budget: Budget
    seed: int
    evaluation_batch: int

    doing = "training"


@dataclass(frozen=True, kw_only=True)
class ContinueTraining(Request[TrainingProgress]):
    """Train up to the next milestone, or end the training here."""

    should_continue: bool

    doing = "training"
