"""What a study searches: the settings of a training, and the space they are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, takewhile
from typing import Literal

from autoaccum.accumulation.schedule import make_schedule


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one trial trains with.

    Attributes:
        learning_rate: Of the first parameter group; the others keep their ratio to it.
        target_batch: Samples per update.
        micro_batch: The most samples at once; given as more than an update has, it is as many as that.
    """

    learning_rate: float
    target_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batch", min(self.micro_batch, self.target_batch))

    @property
    def parts(self) -> tuple[int, ...]:
        """The micro-batches of an update, in samples.

        >>> Setting(learning_rate=0.1, target_batch=256, micro_batch=100).parts
        (86, 85, 85)
        """
        return self.cut()

    def cut(self, multiple_of: int = 1) -> tuple[int, ...]:
        """Those that are multiples of so many samples.

        >>> Setting(learning_rate=0.1, target_batch=256, micro_batch=100).cut(4)
        (88, 84, 84)
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
    """Effective batches in samples, both ends included; both the same where only one is asked for.

    >>> BatchSpan(64, 1024).sizes, BatchSpan(48, 100).sizes, BatchSpan(7, 7).sizes
    ((64, 128, 256, 512, 1024), (48, 96, 100), (7,))
    """

    low: int
    high: int

    @property
    def single(self) -> bool:
        """Whether there is nothing to search."""
        return self.low == self.high

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those that are searched: doublings of the smallest, and the largest.

        Few enough that learning rates at one of them can be compared with each other.
        """
        doublings = takewhile(lambda size: size < self.high, (self.low << times for times in count()))
        return (*doublings, self.high)


@dataclass(frozen=True)
class Budget:
    """How long every trial trains.

    Attributes:
        amount: Samples or seconds of training, evaluations not counted.
        unit: Which of them.
    """

    amount: float
    unit: Literal["samples", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Space:
    """What settings are drawn from.

    Attributes:
        learning_rates: Searched by their logarithm.
        target_batches: Of which `sizes` are searched, unless there is one only.
        micro_batches: Sizes at or below the plan's ceiling, ascending; searched only where they are `coupled`.
        micro_batch: What uncoupled trials run with.
        coupled: Why the micro-batch changes the training, as a clause ("BatchNorm in modules 2 and 5 normalises by
            the micro-batch"); None where it changes speed and memory only.
        own_rate: The workload's own learning rate.
    """

    learning_rates: RateSpan
    target_batches: BatchSpan
    micro_batches: tuple[int, ...]
    micro_batch: int
    coupled: str | None
    own_rate: float
