"""The search space, the events and the result of a study, as frozen records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Request
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput
from autoaccum.tuning.tune_request import BatchSizeRange, Budget, LearningRateRange

MILESTONES = (25, 50)
"""Percent of the budget at which a trial reports its loss before the end."""

FinalState = Literal["complete", "pruned", "diverged", "out_of_memory", "failed"]
RowState = Literal["complete", "pruned", "diverged", "out_of_memory", "failed", "running", "waiting"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The learning rate of one trial (other groups keep their ratio to the first), and its batches in samples."""

    learning_rate: float
    target_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batch", min(self.micro_batch, self.target_batch))

    def cut(self, multiple_of: int = 1) -> tuple[int, ...]:
        """Return the micro-batches of an update, in samples.

        >>> Setting(learning_rate=0.1, target_batch=256, micro_batch=100).cut()
        (86, 85, 85)
        """
        return make_schedule(self.target_batch, self.micro_batch, multiple_of=multiple_of).micro_batches


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The ranges that settings are drawn from.

    Attributes:
        micro_batches: Sizes at or below the plan's ceiling, ascending; searched only if `coupled`.
        micro_batch: The size for uncoupled trials.
        coupled: Why the micro-batch changes the training, as a clause; None if it changes only speed and memory.
        default_learning_rate: The workload's own learning rate.
    """

    learning_rates: LearningRateRange
    target_batches: BatchSizeRange
    micro_batches: tuple[int, ...]
    micro_batch: int
    coupled: str | None
    default_learning_rate: float


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The description of a workload by a child process.

    Attributes:
        digest: The digest of its source files.
        parameters: The number of trainable parameters.
        learning_rate: The default rate of the first parameter group.
        schedule: The class of its scheduler.
        training_samples: Samples without the held-out ones; None if the data has no known length.
        held_out: The held-out data, as a phrase.
        card: The name of the GPU; None on the CPU.
        batchnorms: Names of its BatchNorm modules.
        coupled: Whether its loss is computed of the outputs of the whole effective batch.
    """

    name: str
    digest: str
    model: str
    parameters: int
    optimizer: str
    learning_rate: float
    schedule: str | None
    precision: str
    batchnorm: str
    has_batch: bool
    training_samples: int | None
    held_out: str
    device: str
    card: str | None = None
    batchnorms: tuple[str, ...] = ()
    coupled: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one training.

    Attributes:
        state: `diverged`: a loss or a gradient was not finite. `out_of_memory`: not even smaller micro-batches fit.
            `failed`: the user's code raised, or its process died.
        loss: The held-out loss at the end; None unless complete or pruned.
        seconds: Seconds of training, without evaluations and starts.
        oom_retries: How many times an update was repeated after running out of memory.
        reason: Why it ended early, as a sentence without a full stop.
        user_traceback: The user's own frames, if their code failed.
    """

    state: FinalState
    loss: float | None = None
    samples: int = 0
    seconds: float | None = None
    oom_retries: int = 0
    reason: str | None = None
    user_traceback: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial of a study.

    Attributes:
        setting: None until it is drawn.
        losses: The milestones so far: percent of the budget, and the loss there.
        repeats: The trial that this one retries, since that one's process died.
        confirms: The trial whose setting this one repeats with another seed; None: a trial of the search.
        own: True if it has the workload's default setting.
        lost: True if it was interrupted, or its process died: it does not count.
    """

    number: int
    state: RowState
    setting: Setting | None
    seed: int
    loss: float | None = None
    losses: tuple[tuple[int, float], ...] = ()
    samples: int = 0
    seconds: float | None = None
    oom_retries: int = 0
    repeats: int | None = None
    confirms: int | None = None
    own: bool = False
    reason: str | None = None
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    """A setting with the results of all its runs.

    Attributes:
        losses: The losses of all complete runs; that of `trial` is the first.
        failed: How many runs diverged, ran out of memory or failed.
        mean: The mean of the losses; None if a run failed.
        spread: The standard deviation of the losses; None with fewer than two.
    """

    trial: int
    setting: Setting
    losses: tuple[float, ...]
    failed: int
    mean: float | None
    spread: float | None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of a study so far.

    Attributes:
        storage: Its address, without a password.
        standings: The settings that can win, best first.
        best: The first of them; None if no trial is complete.
        own: The result of the workload's default setting; None if it was not run to the end.
        noise: Differences of loss up to this one may be randomness; None if nothing was repeated.
        plan: The plan for the best setting, with its learning rate; None without one.
        ended: Why the search ended before all trials, as a clause.
    """

    study: str
    storage: str
    workload: Mapping[str, Any]
    space: SearchSpace
    budget: Budget
    held_out: str
    sampler: str
    pruner: str
    seed: int
    throughput: Throughput
    rows: tuple[Row, ...]
    standings: tuple[SettingResult, ...]
    best: SettingResult | None
    own: SettingResult | None
    noise: float | None
    plan: Plan | None = None
    ended: str | None = None
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    schema: int = 3


@dataclass(frozen=True)
class StudyOpened:
    """The workload is described and the study open, with its name, its storage, and the number of finished trials."""

    facts: WorkloadFacts
    name: str
    storage: str
    finished: int
    trials: int


@dataclass(frozen=True)
class SearchStarted:
    """Trials come next; `remembered` is True if the throughput was measured before."""

    space: SearchSpace
    throughput: Throughput
    remembered: bool


@dataclass(frozen=True)
class TrialStarted:
    """A trial trains from now on; `confirms` is as in `Row`."""

    number: int
    setting: Setting
    seed: int
    confirms: int | None = None


@dataclass(frozen=True)
class LossReported:
    """A trial's loss on held-out data at a milestone."""

    number: int
    percent: int
    loss: float


@dataclass(frozen=True)
class TrialEnded:
    """A trial is finished and saved."""

    row: Row


Listener = Callable[[Any], Any]
"""Called with every event, and the planner's while it plans."""


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
