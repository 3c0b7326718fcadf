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
from autoaccum.checks import read_count
from autoaccum.devices.child.failures import Failure
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput

_RATE_HINT = "give two numbers above 0, the smaller first: 1e-4..1e-1"
_BATCH_HINT = "give a whole number of at least 1, or a range with the smaller first: 64..1024"


MILESTONES = (25, 50)
"""Percent of the budget at which a trial reports its loss before the end."""

State = Literal["complete", "pruned", "diverged", "out_of_memory", "failed", "running", "waiting"]


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
    storage: str = "tune.db"
    study: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.reference, (str, os.PathLike)):
            raise UsageError(
                f"the workload is a {type(self.reference).__name__}",
                hint="give the name of its file: each trial trains in its own process, which has to load it",
            )
        object.__setattr__(self, "reference", os.fspath(self.reference))
        read_count(self.trials, "trials")
        read_count(self.seed, "seed", least=0)
        if "://" in self.storage:
            scheme = self.storage.partition("://")[0]
            raise UsageError(f"the storage is a URL, of {scheme}", hint="give an SQLite file, such as tune.db")
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
    """The ranges that settings are drawn from, the micro-batch of all, and the workload's own learning rate."""

    learning_rates: LearningRateRange
    target_batches: BatchSizeRange
    micro_batch: int
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
        device: `cpu`, or the name of the GPU.
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
    dtypes: tuple[str, ...] = ("fp32",)
    coupled: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one training.

    Attributes:
        state: `diverged`: a loss or a gradient was not finite. `out_of_memory`: not even smaller micro-batches fit.
            `failed`: the user's code raised, or its process died.
        loss: The held-out loss at the end; None unless complete.
        seconds: Seconds of its updates.
        oom_retries: How many times an update was repeated after running out of memory.
        reason: Why it ended early, as a sentence without a full stop.
        user_traceback: The user's own frames, if their code failed.
    """

    state: State
    loss: float | None = None
    samples: int = 0
    seconds: float = 0.0
    oom_retries: int = 0
    reason: str | None = None
    user_traceback: str | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of_failure(cls, failure: Failure) -> Outcome:
        """Return the outcome of a training that failed in a child, or that could not load the workload there."""
        state: State = "out_of_memory" if failure.outcome == "oom" else "failed"
        return cls(state=state, reason=failure.message, user_traceback=failure.traceback)


@dataclass(frozen=True, kw_only=True)
class Row(Outcome):
    """One trial of a study; also the event when it starts (`running`) and when it has ended.

    Attributes:
        setting: None until it is drawn.
        losses: The milestones so far: percent of the budget, and the loss there.
        lost: True if it was interrupted, or its process died: it does not count.
    """

    number: int
    setting: Setting | None = None
    losses: tuple[tuple[int, float], ...] = ()
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of a study so far.

    Attributes:
        storage: Its file.
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
    schema: int = 5


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
    remembered: bool


Listener = Callable[[Any], Any]
"""Called with every event, and the planner's while it plans."""

ShouldContinue = Callable[[int, float], bool]
"""Called with a milestone (percent of the budget) and the held-out loss; returns whether to continue."""
