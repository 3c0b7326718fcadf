"""What a study came to, as frozen records of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoaccum.planning.records import Plan
from autoaccum.tuning.settings import Budget, Setting, Space

Ending = Literal["complete", "pruned", "diverged", "out_of_memory", "failed"]
State = Literal["complete", "pruned", "diverged", "out_of_memory", "failed", "running", "waiting"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training came to.

    Attributes:
        state: `complete`: trained for the whole budget. `pruned`: told to end at a milestone. `diverged`: a loss or a
            gradient was not finite, in training or on held-out data. `out_of_memory`: not even smaller micro-batches
            would do. `failed`: by the user's code, or its process died.
        loss: On held-out data at the end; None unless complete or pruned.
        samples: Samples trained on.
        updates: Updates made.
        seconds: Of training, evaluations and starts not counted; None where it was not told.
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
        number: Optuna's, from 0; of confirmations, in the study of confirmations.
        state: As of `Outcome`; or `running`, by some worker, or `waiting` to be taken up.
        setting: What it trains with; None while that is not drawn.
        seed: Of weights, order, and all that is drawn.
        loss: On held-out data at the end of the budget; None unless complete.
        losses: At the milestones: percent of the budget, and the loss there.
        samples: Samples trained on.
        seconds: Of training; None where it was not told.
        shortages: As of `Outcome`.
        repeats: The trial whose parameters it took up again, since its worker was lost; None: of none.
        confirms: The trial of the search whose setting it repeats with another seed; None: it is of the search.
        own: Whether it is the workload's own setting, which the others are compared with.
        reason: As of `Outcome`.
        worker: Who ran it, as `host:pid`; None where nobody did.
        lost: Whether it failed since its worker ended before it did: it says nothing of its setting, and counts as no
            trial; the one that takes up its parameters does.
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
        micro_batch: The size, in samples.
        iter_size: Micro-batches per update.
        state: `measured`; `out_of_memory`; `slower`: not measured, since the next larger ones were far from the best.
        samples_per_second: Median over updates; None unless measured.
        low: The lower quartile.
        high: The upper quartile.
        updates: How many were timed, after those that warm up.
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
    """Samples per second over micro-batches, each measured once for a study.

    Attributes:
        target_batch: Samples per update, in which they were measured.
        device: The device's name.
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
class Bracket:
    """Learning rates that a study cannot tell from the best one, where the loss has one valley.

    Attributes:
        low: The largest tried rate below the best that is clearly worse, as all below it are that can be told; None
            where none is: the optimum may lie below what was searched.
        best: The best rate.
        high: The smallest tried rate above it that is clearly worse, as all above it are; None likewise.
        noise: Differences of loss up to this one count as chance; None where no setting was repeated, and then any
            difference counts.
    """

    low: float | None
    best: float
    high: float | None
    noise: float | None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A setting that several seeds have run, or the only run where none was repeated.

    Attributes:
        trial: The trial of the search it comes from.
        setting: The setting.
        losses: Of every run with it that is complete, the first being the trial's own.
        failed: Runs with it that diverged, ran out of memory or failed.
        mean: Of the losses; None where a run failed: such a setting does not win while another can.
        spread: Standard deviation of the losses; None with less than two.
    """

    trial: int
    setting: Setting
    losses: tuple[float, ...]
    failed: int
    mean: float | None
    spread: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a rule says of the learning rate for another effective batch.

    Attributes:
        target_batch: The other effective batch.
        linear: By the linear rule.
        square_root: By the square-root rule.
    """

    target_batch: int
    linear: float
    square_root: float


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a study has found so far.

    Attributes:
        study: Its name.
        storage: Where it is kept; passwords are left out.
        storage_url: The same, as Optuna's commands and its dashboard are given it.
        workload: Name, model, digest.
        space: What was searched.
        budget: Of every trial.
        held_out: What the loss was measured on, as a phrase.
        sampler: Which sampler with which settings, as a phrase.
        pruner: Likewise.
        seed: Of the sampler and of every trial of the search.
        throughput: Samples per second over micro-batches.
        rows: The trials of the search, then the confirmations.
        standings: The settings that can win, best first.
        best: The first of them; None where no trial is complete.
        own: The standing of the workload's own learning rate; None where it was not run to the end.
        bracket: Rates that cannot be told from the best; None where no trial is complete.
        advice: What rules say of other effective batches; empty where no trial is complete.
        plan: For the best setting, with its learning rate; None where there is none.
        ended: Why the search ended before its trials were all run, as a clause; None when it did not.
        seconds: What this call took.
        warnings: What a person should know, as sentences.
        schema: Version of the record.
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
    bracket: Bracket | None
    advice: tuple[Advice, ...]
    plan: Plan | None
    ended: str | None = None
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    schema: int = 1
