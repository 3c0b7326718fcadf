"""What a study searches and what it came to, as frozen records of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Literal

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.planning.records import Plan

MILESTONES = (25, 50)
"""Percent of the budget at which a trial's loss is reported before its end."""

Ending = Literal["complete", "pruned", "diverged", "out_of_memory", "failed"]
State = Literal["complete", "pruned", "diverged", "out_of_memory", "failed", "running", "waiting"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one trial trains with.

    Attributes:
        learning_rate: Of the first parameter group; the others keep their ratio to it.
        target_batch: Samples per update.
        micro_batch: The most samples at once; at most the target batch.
    """

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


@dataclass(frozen=True)
class RateSpan:
    """Learning rates, both ends included."""

    low: float
    high: float

    def __contains__(self, rate: float) -> bool:
        return self.low <= rate <= self.high


@dataclass(frozen=True)
class BatchSpan:
    """Effective batches in samples, both ends included; equal ends where only one is asked for.

    >>> BatchSpan(64, 1024).sizes, BatchSpan(48, 100).sizes, BatchSpan(7, 7).sizes
    ((64, 128, 256, 512, 1024), (48, 96, 100), (7,))
    """

    low: int
    high: int

    @property
    def single(self) -> bool:
        """Return whether there is nothing to search."""
        return self.low == self.high

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return those that are searched: doublings of the smallest, and the largest."""
        return (*takewhile(lambda size: size < self.high, (self.low << times for times in count())), self.high)


@dataclass(frozen=True)
class Budget:
    """How long every trial trains: samples, or seconds of training without evaluations."""

    amount: float
    unit: Literal["samples", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Space:
    """What settings are drawn from.

    Attributes:
        learning_rates: Searched by their logarithm.
        target_batches: Of which `sizes` are searched.
        micro_batches: Sizes at or below the plan's ceiling, ascending; searched only where they are `coupled`.
        micro_batch: What uncoupled trials run with.
        coupled: Why the micro-batch changes the training, as a clause; None where it changes speed and memory only.
        own_rate: The workload's own learning rate.
    """

    learning_rates: RateSpan
    target_batches: BatchSpan
    micro_batches: tuple[int, ...]
    micro_batch: int
    coupled: str | None
    own_rate: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a study has to know of a workload, as a child process has found it.

    Attributes:
        digest: Over its source files.
        parameters: How many numbers train.
        learning_rate: Of the optimizer's first parameter group: the workload's own.
        schedule: The class of the schedule; None when there is none.
        has_batch: Whether it defines `batch(size)`.
        training_samples: To train on, without what is held out; None where the data does not tell.
        held_out: What losses are measured on, as a phrase.
        card: The card's name; None on the CPU.
        batchnorms: Names of its BatchNorm modules, unless they are frozen.
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
        seconds: Of training, without evaluations and starts; None where it was not told.
        shortages: How often an update was repeated in smaller micro-batches because memory ran out.
        reason: Why it ended, as a sentence without a full stop; None where it is complete or pruned.
        user_traceback: The user's own frames, where their code failed.
        warnings: What went wrong without ending it.
    """

    state: Ending
    loss: float | None = None
    samples: int = 0
    updates: int = 0
    seconds: float | None = None
    shortages: int = 0
    reason: str | None = None
    user_traceback: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial of a study.

    Attributes:
        number: Optuna's, from 0.
        state: As of `Outcome`; or `running`, or `waiting` in Optuna's queue.
        setting: What it trains with; None while that is not drawn.
        losses: At the milestones: percent of the budget, and the loss there.
        repeats: The trial whose parameters it takes up again, since that one's process died; None: of none.
        confirms: The trial whose setting it repeats with another seed; None: it is of the search.
        own: Whether it is the workload's own setting.
        worker: Who ran it, as `host:pid`; None where nobody did.
        lost: Whether it was interrupted, or its process died: it does not count.
    """

    number: int
    state: State
    setting: Setting | None
    seed: int
    loss: float | None = None
    losses: tuple[tuple[int, float], ...] = ()
    samples: int = 0
    seconds: float | None = None
    shortages: int = 0
    repeats: int | None = None
    confirms: int | None = None
    own: bool = False
    reason: str | None = None
    worker: str | None = None
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Updates with one micro-batch size, timed.

    Attributes:
        iter_size: Micro-batches per update.
        state: `slower`: not measured, since the next larger ones were far from the best.
        samples_per_second: Median over updates, between the quartiles `low` and `high`; None unless measured.
        updates: How many were timed.
    """

    micro_batch: int
    iter_size: int
    state: Literal["measured", "out_of_memory", "slower"]
    samples_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    updates: int = 0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples per second over micro-batches, measured once for a study.

    Attributes:
        target_batch: Samples per update, in which they were measured.
        speeds: By ascending micro-batch.
        fastest: The micro-batch with the highest median.
        knee: The smallest within 2 % of that.
    """

    target_batch: int
    device: str
    speeds: tuple[Speed, ...]
    fastest: int
    knee: int


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A setting with all its runs.

    Attributes:
        trial: The trial of the search it comes from.
        losses: Of every complete run, the trial's own first.
        failed: Runs that diverged, ran out of memory or failed.
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
        storage_url: The same, as Optuna's commands and its dashboard are given it.
        workload: Its facts.
        held_out: What the loss was measured on, as a phrase.
        rows: All trials.
        standings: The settings that can win, best first.
        best: The first of them; None where no trial is complete.
        own: The standing of the workload's own learning rate; None where it was not run to the end.
        noise: Differences of loss up to this one may be chance; None where nothing was repeated.
        plan: For the best setting, with its learning rate; None where there is none.
        ended: Why the search ended before its trials were all run, as a clause; None when it did not.
        seconds: What this call took.
        warnings: What a person should know, as sentences.
    """

    study: str
    storage: str
    storage_url: str
    workload: Mapping[str, Any]
    space: Space
    budget: Budget
    held_out: str
    sampler: str
    pruner: str
    seed: int
    throughput: Throughput
    rows: tuple[Row, ...]
    standings: tuple[Standing, ...]
    best: Standing | None
    own: Standing | None
    noise: float | None
    plan: Plan | None = None
    ended: str | None = None
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    schema: int = 2
