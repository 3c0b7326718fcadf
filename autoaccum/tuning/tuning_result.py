"""What a study searches, what it tells while it goes on, and what it came to, as frozen records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.planning.plan import Plan
from autoaccum.tuning.tune_request import BatchSizeRange, Budget, LearningRateRange

MILESTONES = (25, 50)
"""Percent of the budget at which a trial's loss is reported before its end."""

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
    """What settings are drawn from.

    Attributes:
        micro_batches: Sizes at or below the plan's ceiling, ascending; searched only where they are `coupled`.
        micro_batch: What uncoupled trials run with.
        coupled: Why the micro-batch changes the training, as a clause; None where it changes speed and memory only.
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
    """What a child process has found of a workload.

    Attributes:
        digest: Over its source files.
        parameters: How many numbers train.
        learning_rate: The workload's own, of the first parameter group.
        schedule: Its class.
        training_samples: Without what is held out; None where the data does not tell.
        held_out: What losses are measured on, as a phrase.
        card: Its name; None on the CPU.
        batchnorms: Names of its BatchNorm modules.
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training came to.

    Attributes:
        state: `diverged`: a loss or a gradient was not finite. `out_of_memory`: not even smaller micro-batches would
            do. `failed`: by the user's code, or its process died.
        loss: On held-out data at the end; None unless complete or pruned.
        seconds: Of training, without evaluations and starts.
        oom_retries: How often an update was repeated in smaller micro-batches because memory ran out.
        reason: Why it ended early, as a sentence without a full stop.
        user_traceback: The user's own frames, where their code failed.
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
        setting: None while it is not drawn.
        losses: At the milestones: percent of the budget, and the loss there.
        repeats: The trial whose parameters it takes up again, since that one's process died.
        confirms: The trial whose setting it repeats with another seed; None: it is of the search.
        own: It has the workload's own setting.
        lost: It was interrupted, or its process died: it does not count.
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
class Speed:
    """Updates with one micro-batch size, timed.

    Attributes:
        samples_per_second: Median over updates, between the quartiles `low` and `high`; None: not measured, since the
            next larger ones were far from the best.
        updates: How many were timed.
    """

    micro_batch: int
    iter_size: int
    samples_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples per second by ascending micro-batch; the knee is the smallest within 2 % of the fastest."""

    target_batch: int
    device: str
    speeds: tuple[Speed, ...]
    fastest: int
    knee: int


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    """A setting with all its runs.

    Attributes:
        losses: Of every complete run, the one of its `trial` first.
        failed: How many diverged, ran out of memory or failed.
        mean: Of the losses; None where a run failed.
        spread: Standard deviation of the losses; None with less than two.
    """

    trial: int
    setting: Setting
    losses: tuple[float, ...]
    failed: int
    mean: float | None
    spread: float | None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a study has found so far.

    Attributes:
        study: Its name.
        storage: Where it is kept, without a password.
        workload: Its facts.
        standings: The settings that can win, best first.
        best: The first of them; None where no trial is complete.
        own: The standing of the workload's own learning rate; None where it was not run to the end.
        noise: Differences of loss up to this one may be chance; None where nothing was repeated.
        plan: For the best setting, with its learning rate; None where there is none.
        ended: Why the search ended before its trials were all run, as a clause.
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
    """The workload was described, and the study is there: its name, its storage, and the trials finished already."""

    facts: WorkloadFacts
    name: str
    storage: str
    finished: int
    trials: int


@dataclass(frozen=True)
class SearchStarted:
    """Trials come next; `remembered` is whether the throughput was measured before."""

    space: SearchSpace
    throughput: Throughput
    remembered: bool


@dataclass(frozen=True)
class TrialStarted:
    """A trial trains from now on; `confirms` as in `Row`."""

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
    """A trial is finished, and kept."""

    row: Row


Listener = Callable[[Any], Any]
"""Given every event, and the planner's while it plans."""
