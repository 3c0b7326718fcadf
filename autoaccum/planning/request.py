"""What is to be planned: numbers, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoaccum.accumulation.schedule import Schedule, even_parts, make_schedule
from autoaccum.errors import UsageError

LOOKED_AT = 64
"""How many samples of a dataset are looked at for the longest, where a workload has no `batch` of its own."""

_LEAST_CHECK_SECONDS = 30.0
"""Under any limit on time, since there is no plan without a check."""
_MOST_SAMPLES, _MOST_RANKS = 10_000_000, 100_000


@dataclass(frozen=True)
class Request:
    """What a plan is asked to do.

    Attributes:
        target_batch: Samples per update, over all ranks.
        world_size: Ranks that share it.
        equal: Equal micro-batches only.
        max_micro_batch: Try no larger size, in samples.
        max_trials: The search ends after as many trials; the confirmation comes on top.
        time_limit: Seconds after which the search ends; what it has proved by then is confirmed.
        least: Measure the least budget at which the schedule still runs.
        explain: Tell where the memory goes, and what would change that.
        picture: Tell what a picture of it needs, where the device can.
        multiple_of: Every micro-batch is a multiple of so many samples; None: as the workload says or needs it.

    Raises:
        UsageError: A number is not a whole one of at least 1, or beyond all use (a schedule lists all its parts), or
            equal parts do not divide the target, or what is True or False is something else.
    """

    target_batch: int
    world_size: int = 1
    equal: bool = False
    max_micro_batch: int | None = None
    max_trials: int | None = None
    time_limit: float | None = None
    least: bool = False
    explain: bool = False
    picture: bool = False
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        for what, number, most in (
            ("target batch", self.target_batch, _MOST_SAMPLES),
            ("world size", self.world_size, _MOST_RANKS),
        ):
            if isinstance(number, int) and number > most:
                raise UsageError(f"the {what} is beyond {most:,}", hint="take a smaller one")
        if self.multiple_of is not None and not _is_count(self.multiple_of):
            raise UsageError(f"multiple_of is {self.multiple_of!r}", hint="give a whole number of at least 1")
        self.schedule(self.each if self.max_micro_batch is None else self.max_micro_batch)
        if self.max_trials is not None and not _is_count(self.max_trials):
            raise UsageError(f"the most trials are {self.max_trials!r}", hint="give a whole number of at least 1")
        if self.time_limit is not None:
            check_seconds(self.time_limit, "the time limit", "give the seconds the search may take, more than 0")
        for what, answer in (("explain", self.explain), ("picture", self.picture)):
            if not isinstance(answer, bool):
                raise UsageError(f"{what} is {answer!r}", hint="give True or False")

    @property
    def share(self) -> int:
        """Samples per update on the rank with the longest share."""
        return even_parts(self.target_batch // self.each, self.world_size)[0] * self.each

    @property
    def each(self) -> int:
        """What every micro-batch is a multiple of, as far as that is known."""
        return self.multiple_of or 1

    @property
    def limited(self) -> bool:
        """Whether something may end the search before it knows the largest size."""
        return self.max_trials is not None or self.time_limit is not None

    @property
    def check_limit(self) -> float | None:
        """Seconds that loading the workload may take, and checking it; None: no limit but those of every trial."""
        return None if self.time_limit is None else max(self.time_limit, _LEAST_CHECK_SECONDS)

    @property
    def cap(self) -> int:
        """The largest size worth trying."""
        most = min(self.share, self.max_micro_batch or self.share)
        return most - most % self.each

    def schedule(self, ceiling: int) -> Schedule:
        """How the target is cut when the largest size that fits is `ceiling`."""
        return make_schedule(
            self.target_batch, ceiling, world_size=self.world_size, equal=self.equal, multiple_of=self.each
        )


def check_seconds(seconds: float, what: str, hint: str) -> float:
    """A time as a float.

    Raises:
        UsageError: It is not a finite number above 0.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds <= 0:
        raise UsageError(f"{what} is {seconds!r}", hint=hint)
    return float(seconds)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
