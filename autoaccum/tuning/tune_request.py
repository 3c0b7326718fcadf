"""What `autoaccum.tune` is asked for, checked before anything starts."""

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
_LEAST = {"trials": 1, "confirm": 0, "seed": 0, "heartbeat": 1}
_RATES = "give two numbers above 0, the smaller first: 1e-4..1e-1"
_BATCHES = "give a whole number of at least 1, or a range with the smaller first: 64..1024"


@dataclass(frozen=True)
class LearningRateRange:
    """Learning rates, both ends included."""

    low: float
    high: float


@dataclass(frozen=True)
class BatchSizeRange:
    """Effective batches in samples, both ends included; equal ends where only one is asked for.

    >>> BatchSizeRange(64, 1024).sizes, BatchSizeRange(48, 100).sizes, BatchSizeRange(7, 7).sizes
    ((64, 128, 256, 512, 1024), (48, 96, 100), (7,))
    """

    low: int
    high: int

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
class TuneRequest:
    """The arguments of `autoaccum.tune`, where each is explained; `reference` is its `workload`.

    Raises:
        UsageError: One of them cannot be honoured, or they contradict each other.
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
                hint="give the name of its file: each trial trains in a process of its own, which has to load it",
            )
        object.__setattr__(self, "reference", os.fspath(self.reference))
        for name, least in _LEAST.items():
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
        """Return what was asked for; None: once over the data."""
        if self.budget_seconds is not None:
            return Budget(self.budget_seconds, "seconds")
        return None if self.budget_samples is None else Budget(self.budget_samples, "samples")


def read_rates(given: Any) -> LearningRateRange | None:
    """Read learning rates: `1e-4..1e-1`, or two numbers.

    Raises:
        UsageError: They are no range of numbers above 0.
    """
    if given is None:
        return None
    with suppress(TypeError, ValueError):
        low, high = map(float, given.split("..") if isinstance(given, str) else given)
        if 0 < low < high < math.inf:
            return LearningRateRange(low, high)
    raise UsageError(f"the learning rate is {given!r}", hint=_RATES)


def read_batches(given: Any) -> BatchSizeRange:
    """Read effective batches: `256`, `64..1024`, a number, or two.

    Raises:
        UsageError: They are no range of whole numbers above 0.
    """
    ends = given.split("..") if isinstance(given, str) else given if isinstance(given, (tuple, list)) else [given]
    with suppress(TypeError, ValueError):
        low, high = (int(end) if isinstance(end, str) else operator.index(end) for end in (ends[0], ends[-1]))
        if len(ends) <= 2 and 1 <= low <= high:
            return BatchSizeRange(low, high)
    raise UsageError(f"the target batch is {given!r}", hint=_BATCHES)
