"""What a study is asked to do: everything `autoaccum.tune` is given, checked before anything starts."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from autoaccum.errors import UsageError
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan
from autoaccum.units import MemorySize, parse_size

if TYPE_CHECKING:
    from autoaccum.planning.records import Plan

_MOST_SEED = 2**31 - 1
"""Generators take 32 bits, and confirmations have seeds of their own above it."""

Sampler = Literal["tpe", "random"]
Pruner = Literal["halving", "none"]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The arguments of `autoaccum.tune`, where each is explained; `reference` is its `workload`.

    Raises:
        UsageError: One of them cannot be honoured, or they contradict each other.
    """

    reference: str
    target_batch: BatchSpan
    trials: int = 30
    learning_rate: RateSpan | None = None
    budget_samples: int | None = None
    budget_seconds: float | None = None
    confirm: int = 3
    storage: str | None = None
    study: str | None = None
    seed: int = 0
    sampler: Sampler | str = "tpe"
    pruner: Pruner | str = "halving"
    heartbeat: float = 20.0
    time_limit: float | None = None
    trial_limit: float | None = None
    plan: Plan | str | Path | None = None
    device: str = "auto"
    memory: str | MemorySize | None = None
    reserve: str | MemorySize | None = None
    precision: str | None = None
    batchnorm: str | None = None
    optimizer: str | None = None
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        self._check_reference()
        for name, least in (("trials", 1), ("confirm", 0), ("seed", 0)):
            self._check_count(name, least)
        for name in ("budget_samples", "multiple_of"):
            if getattr(self, name) is not None:
                self._check_count(name, 1)
        for name in ("budget_seconds", "heartbeat", "time_limit", "trial_limit"):
            self._check_seconds(name)
        if self.budget_samples is not None and self.budget_seconds is not None:
            raise UsageError("budget_samples and budget_seconds are both given", hint="give one of them")
        for name, known in (("sampler", get_args(Sampler)), ("pruner", get_args(Pruner))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint=f"take one of {', '.join(known)}")
        if self.seed > _MOST_SEED:
            raise UsageError(f"seed is {self.seed}", hint=f"give one of at most {_MOST_SEED}")
        storage: Any = self.storage
        if isinstance(storage, os.PathLike):
            object.__setattr__(self, "storage", os.fspath(storage))
        for name in ("storage", "study"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip() or "\0" in value):
                raise UsageError(f"{name} is {value!r}", hint=f"give the name of a {name}, or leave it away")
        for name in ("memory", "reserve"):
            value = getattr(self, name)
            if isinstance(value, str):
                parse_size(value)
            elif value is not None and not isinstance(value, MemorySize):
                raise UsageError(f"{name} is {value!r}", hint="give a size: 10GiB, 24GB, 80%")
        for name in ("precision", "batchnorm", "optimizer"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint="give its name")

    @property
    def budget(self) -> Budget | None:
        """As asked for; None: once over the data."""
        if self.budget_seconds is not None:
            return Budget(self.budget_seconds, "seconds")
        return None if self.budget_samples is None else Budget(self.budget_samples, "samples")

    def _check_reference(self) -> None:
        if not isinstance(self.reference, (str, os.PathLike)):
            raise UsageError(
                f"what is to be tuned is {type(self.reference).__name__}",
                hint="give the file of a workload: each trial runs in a process of its own, which has to load it",
            )
        object.__setattr__(self, "reference", os.fspath(self.reference))

    def _check_count(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or number < least:
            raise UsageError(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")
        object.__setattr__(self, name, number)

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise UsageError(f"{name} is {value!r}", hint="give seconds, more than 0")


def read_rates(given: Any) -> RateSpan | None:
    """Learning rates as given: `1e-4..1e-1`, or two numbers.

    >>> read_rates("1e-4..0.1"), read_rates((0.001, 1))
    (RateSpan(low=0.0001, high=0.1), RateSpan(low=0.001, high=1.0))

    Raises:
        UsageError: They are no range of numbers above 0, or an empty one.
    """
    if given is None or isinstance(given, RateSpan):
        return given
    hint = "give two numbers above 0, the smaller first: 1e-4..1e-1"
    low, high = _two(given, _number, "learning rate", hint)
    if not (0 < low < math.inf and 0 < high < math.inf):
        raise UsageError(f"the learning rates are {_shown(given)}", hint=hint)
    if low >= high:
        raise UsageError(f"the learning rates {_shown(given)} are an empty range", hint=hint)
    return RateSpan(low, high)


def read_batches(given: Any) -> BatchSpan:
    """Effective batches as given: `256`, `64..1024`, a number, or two.

    >>> read_batches("64..1024"), read_batches(256)
    (BatchSpan(low=64, high=1024), BatchSpan(low=256, high=256))

    Raises:
        UsageError: They are no whole numbers of at least 1, or an empty range.
    """
    if isinstance(given, BatchSpan):
        return given
    hint = "give a whole number of at least 1, or a range with the smaller first: 64..1024"
    if not isinstance(given, (tuple, list)) and ".." not in str(given):
        given = (given, given)
    low, high = _two(given, _whole, "target batch", hint)
    if low < 1:
        raise UsageError(f"the target batch is {_shown(given)}", hint=hint)
    if low > high:
        raise UsageError(f"the target batches {_shown(given)} are an empty range", hint=hint)
    return BatchSpan(low, high)


def _two(given: Any, read: Any, what: str, hint: str) -> tuple[Any, Any]:
    ends = given.split("..") if isinstance(given, str) else given
    try:
        low, high = ends
        return read(low), read(high)
    except (TypeError, ValueError):
        raise UsageError(f"the {what} is {_shown(given)}", hint=hint) from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, str) else operator.index(value)


def _shown(given: Any) -> str:
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return f"{given[0]}" if given[0] == given[1] else f"{given[0]}..{given[1]}"
    return repr(given)
