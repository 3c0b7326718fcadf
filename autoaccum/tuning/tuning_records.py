"""The arguments, the search space, the events and the result of a study, as frozen records."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Literal

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.checks import check_word, read_count
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Request
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput

PRUNERS = ("halving", "none")
_RATE_HINT = "give two numbers above 0, the smaller first: 1e-4..1e-1"
_BATCH_HINT = "give a whole number of at least 1, or a range with the smaller first: 64..1024"


MILESTONES = (25, 50)
"""Percent of the budget at which a trial reports its loss before the end."""

FinalState = Literal["complete", "pruned", "diverged", "out_of_memory", "failed"]
RowState = Literal["complete", "pruned", "diverged", "out_of_memory", "failed", "running", "waiting"]


@dataclass(frozen=True)
class LearningRateRange:
    """A range of learning rates, both ends included."""

    low: float
    high: float


@dataclass(frozen=True)
class BatchSizeRange:
    """A range of effective batches in samples, both ends included; the ends are equal for a single size.

    >>> BatchSizeRange(64, 1024).sizes, BatchSizeRange(48, 100).sizes, BatchSizeRange(7, 7).sizes
    ((64, 128, 256, 512, 1024), (48, 96, 100), (7,))
    """

    low: int
    high: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are searched: doublings of the smallest, and the largest."""
        return (*takewhile(lambda size: size < self.high, (self.low << times for times in count())), self.high)


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The arguments of `autoaccum.tune`, which documents each; `reference` is its `workload`.

    Raises:
        UsageError: An argument is invalid, or two contradict each other.
    """

    reference: str
    target_batch: BatchSizeRange
    options: Options = Options()
    trials: int = 30
    learning_rate: LearningRateRange | None = None
    budget_samples: int | None = None
    storage: str | None = None
    study: str | None = None
    seed: int = 0
    pruner: str = "halving"

    def __post_init__(self) -> None:
        if not isinstance(self.reference, (str, os.PathLike)):
            raise UsageError(
                f"the workload is a {type(self.reference).__name__}",
                hint="give the name of its file: each trial trains in its own process, which has to load it",
            )
        object.__setattr__(self, "reference", os.fspath(self.reference))
        read_count(self.trials, "trials")
        read_count(self.seed, "seed", least=0)
        check_word(self.pruner, "pruner", PRUNERS)
        if self.budget_samples is not None:
            read_count(self.budget_samples, "budget_samples")


def read_rates(given: Any) -> LearningRateRange | None:
    """Read a range of learning rates, `1e-4..1e-1` or two numbers; raise UsageError unless they are above 0."""
    if given is None:
        return None
    with suppress(TypeError, ValueError):
        low, high = map(float, given.split("..") if isinstance(given, str) else given)
        if 0 < low < high < math.inf:
            return LearningRateRange(low, high)
    raise UsageError(f"the learning rate is {given!r}", hint=_RATE_HINT)


def read_batches(given: Any) -> BatchSizeRange:
    """Read a range of effective batches, `256`, `64..1024`, a number or two; raise UsageError if they are no counts."""
    ends = given.split("..") if isinstance(given, str) else given if isinstance(given, (tuple, list)) else [given]
    with suppress(TypeError, ValueError):
        low, high = (int(end) if isinstance(end, str) else operator.index(end) for end in (ends[0], ends[-1]))
        if len(ends) <= 2 and 1 <= low <= high:
            return BatchSizeRange(low, high)
    raise UsageError(f"the target batch is {given!r}", hint=_BATCH_HINT)


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
        dtypes: The dtypes of the parameters, such as `bf16`.
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
    dtypes: tuple[str, ...] = ("fp32",)
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
        lost: True if it was interrupted, or its process died: it does not count.
    """

    number: int
    state: RowState
    setting: Setting | None
    loss: float | None = None
    losses: tuple[tuple[int, float], ...] = ()
    seconds: float | None = None
    oom_retries: int = 0
    reason: str | None = None
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of a study so far.

    Attributes:
        storage: Its address, without a password.
        budget: The samples that each trial trains on.
        best: The complete trial with the lowest loss; None if no trial is complete.
        own: The trial with the workload's own learning rate; None if it was not run to the end.
        plan: The plan for the best setting, with its learning rate; None without one.
        ended: Why the search ended before all trials, as a clause.
    """

    study: str
    storage: str
    workload: Mapping[str, Any]
    space: SearchSpace
    budget: int
    rows: tuple[Row, ...]
    best: Row | None
    own: Row | None
    plan: Plan | None = None
    ended: str | None = None
    throughput: Throughput | None = None
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    schema: int = 4


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
    """Trials come next; `remembered` is True if the plan was made before."""

    space: SearchSpace
    micro_batch: int
    remembered: bool


@dataclass(frozen=True)
class TrialStarted:
    """A trial trains from now on."""

    number: int
    setting: Setting


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
    budget: int
    seed: int
    evaluation_batch: int

    doing = "training"


@dataclass(frozen=True, kw_only=True)
class ContinueTraining(Request[TrainingProgress]):
    """Train up to the next milestone, or end the training here."""

    should_continue: bool

    doing = "training"
