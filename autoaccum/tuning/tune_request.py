"""The arguments of `autoaccum.tune`, checked before anything starts."""

from __future__ import annotations

import math
import operator
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Literal

from autoaccum.checks import check_word, read_count, read_seconds
from autoaccum.errors import UsageError
from autoaccum.options import Options

SAMPLERS, PRUNERS = ("tpe", "random"), ("halving", "none")
_MINIMUM = {"trials": 1, "confirm": 0, "seed": 0, "heartbeat": 1}
_RATE_HINT = "give two numbers above 0, the smaller first: 1e-4..1e-1"
_BATCH_HINT = "give a whole number of at least 1, or a range with the smaller first: 64..1024"


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


@dataclass(frozen=True)
class Budget:
    """The length of every trial: samples, or seconds of training without evaluations."""

    amount: float
    unit: Literal["samples", "seconds"]


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
    budget_seconds: float | None = None
    confirm: int = 3
    storage: str | None = None
    study: str | None = None
    seed: int = 0
    sampler: str = "tpe"
    pruner: str = "halving"
    heartbeat: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.reference, (str, os.PathLike)):
            raise UsageError(
                f"the workload is a {type(self.reference).__name__}",
                hint="give the name of its file: each trial trains in its own process, which has to load it",
            )
        object.__setattr__(self, "reference", os.fspath(self.reference))
        for name, least in _MINIMUM.items():
            object.__setattr__(self, name, read_count(getattr(self, name), name, least=least))
        check_word(self.sampler, "sampler", SAMPLERS)
        check_word(self.pruner, "pruner", PRUNERS)
        if self.budget_samples is not None and self.budget_seconds is not None:
            raise UsageError("budget_samples and budget_seconds are both given", hint="give one of them")
        if self.budget_samples is not None:
            read_count(self.budget_samples, "budget_samples")
        if self.budget_seconds is not None:
            read_seconds(self.budget_seconds, "budget_seconds")

    @property
    def budget(self) -> Budget | None:
        """The requested budget; None: one epoch."""
        if self.budget_seconds is not None:
            return Budget(self.budget_seconds, "seconds")
        return None if self.budget_samples is None else Budget(self.budget_samples, "samples")


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
