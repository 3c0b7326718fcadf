"""The arguments, the search space, the events and the result of a study, as frozen records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from autoaccum.checks import read_count
from autoaccum.devices.child.failures import Failure
from autoaccum.errors import UsageError
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Throughput

MILESTONES = (25, 50)
"""Percent of the budget at which a trial reports its loss before the end."""

State = Literal["complete", "pruned", "diverged", "out_of_memory", "failed", "running", "waiting"]


@dataclass(frozen=True)
class LearningRateRange:
    """A range of learning rates, both ends included."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What the trials of a study may train with.

    Attributes:
        target_batches: Effective batches, ascending.
        micro_batches: The largest micro-batches, ascending: the plan's alone, unless samples of a micro-batch depend
            on each other, so that its size decides what is learned.
    """

    learning_rates: LearningRateRange
    target_batches: tuple[int, ...]
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The arguments of `autoaccum.tune`, which documents each; `reference` is its `workload`.

    Raises:
        UsageError: An argument is invalid, or two contradict each other.
    """

    reference: str
    target_batch: int | range
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
        for name, least in (("trials", 1), ("seed", 0)):
            read_count(getattr(self, name), name, least=least)
        if isinstance(self.target_batch, range) and self.target_batch and self.target_batch.step == 1:
            read_count(self.target_batch[0], "target_batch")
        else:
            read_count(self.target_batch, "target_batch")
        if "://" in self.storage:
            scheme = self.storage.partition("://")[0]
            raise UsageError(f"the storage is a URL, of {scheme}", hint="give an SQLite file, such as tune.db")
        if self.budget_samples is not None:
            read_count(self.budget_samples, "budget_samples")

    @property
    def target_batches(self) -> tuple[int, ...]:
        """The effective batches to search, ascending: of a range, its first and the doublings of that."""
        if not isinstance(self.target_batch, range):
            return (self.target_batch,)
        first, last = self.target_batch[0], self.target_batch[-1]
        return tuple(first << doublings for doublings in range((last // first).bit_length()))


def read_rates(given: Any) -> LearningRateRange | None:
    """Read a range of learning rates, `1e-4..1e-1` or two numbers; raise UsageError unless they are above 0."""
    if given is None:
        return None
    with suppress(TypeError, ValueError):
        low, high = map(float, given.split("..") if isinstance(given, str) else given)
        if 0 < low < high < math.inf:
            return LearningRateRange(low, high)
    raise UsageError(f"the learning rate is {given!r}", hint="give two numbers above 0, the smaller first: 1e-4..1e-1")


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The description of a workload by a child process.

    Attributes:
        reference: How it was named.
        digest: The digest of its source files.
        learning_rate: The default rate of the first parameter group.
        schedule: The class of its scheduler.
        has_batch: Whether it makes batches for trials itself, or by the lengths of its samples.
        training_samples: Samples without the held-out ones; None if the data has no known length.
        held_out: The held-out data, as a phrase.
        device: `cpu`, or the name of the GPU.
    """

    name: str
    digest: str
    optimizer: str
    learning_rate: float
    schedule: str | None
    has_batch: bool
    training_samples: int | None
    held_out: str
    device: str
    reference: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one training.

    Attributes:
        state: `diverged`: a loss or a gradient was not finite. `out_of_memory`: not even smaller micro-batches fit.
            `failed`: the user's code raised, or its process died.
        loss: The held-out loss at the end; None unless complete.
        seconds: Seconds of its updates.
        oom_retries: How many times an update was repeated after running out of memory.
        reason: Why it ended early.
        user_traceback: The user's own frames, if their code failed.
        warnings: What training warned of.
    """

    state: State
    loss: float | None = None
    samples: int = 0
    seconds: float = 0.0
    oom_retries: int = 0
    reason: Message | None = None
    user_traceback: str | None = None
    warnings: tuple[Message, ...] = ()

    @classmethod
    def of_failure(cls, failure: Failure) -> Outcome:
        """Return the outcome of a training that failed in a child, or that could not load the workload there."""
        state: State = "out_of_memory" if failure.outcome == "oom" else "failed"
        reason = message("error", error=failure.outcome, text=failure.message)
        return cls(state=state, reason=reason, user_traceback=failure.traceback)


@dataclass(frozen=True, kw_only=True)
class Row(Outcome):
    """One trial of a study; also the event when it starts (`running`) and when it has ended.

    Attributes:
        learning_rate: That of the first group, to which the others keep their ratio; None until it is drawn.
        target_batch: Samples per update; None until it is drawn.
        micro_batch: The largest micro-batch that the updates may be cut into; None until it is drawn.
        losses: The milestones so far: percent of the budget, and the loss there.
        lost: True if it was interrupted, or its process died: it does not count.
    """

    number: int
    learning_rate: float | None = None
    target_batch: int | None = None
    micro_batch: int | None = None
    losses: tuple[tuple[int, float], ...] = ()
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of a study so far.

    Attributes:
        storage: Its file.
        workload: What was trained.
        space: What was searched.
        budget: The samples that each trial trains on.
        best: The complete trial with the lowest loss; None if no trial is complete.
        own: The trial with the workload's own learning rate; None if it was not run to the end.
        plan: The plan of the best setting, with its learning rate; None without one.
        ended: Why the search ended before all trials.
    """

    study: str
    storage: str
    workload: WorkloadFacts
    space: SearchSpace
    budget: int
    rows: tuple[Row, ...]
    best: Row | None
    own: Row | None
    plan: Plan | None = None
    ended: Message | None = None
    throughput: Throughput | None = None
    seconds: float = 0.0
    warnings: tuple[Message, ...] = ()
    schema: int = 7


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
    """Trials come next; `remembered` is True if the plan, of the largest target batch, was made before."""

    space: SearchSpace
    plan: Plan
    remembered: bool


Listener = Callable[[Any], Any]
"""Called with every event, with the planner's while it plans, and with warnings (`autoaccum.messages.Message`)."""

ShouldContinue = Callable[[int, float], bool]
"""Called with a milestone (percent of the budget) and the held-out loss; returns whether to continue."""
