"""What is to be planned: numbers, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoaccum.accumulation.schedule import Schedule, even_parts, make_schedule
from autoaccum.checks import check_flag, read_count
from autoaccum.errors import UsageError
from autoaccum.options import Options

LOOKED_AT = 64
"""How many samples of a dataset are looked at for the longest, where a workload has no `batch` of its own."""

_LEAST_CHECK_SECONDS = 30.0
"""Under any limit on time, since there is no plan without a check."""
_MOST_SAMPLES, _MOST_RANKS = 10_000_000, 100_000


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked to do.

    Attributes:
        target_batch: Samples per update, over all ranks.
        options: How the workload is to run.
        max_micro_batch: Try no larger size, in samples.
        max_trials: The search ends after as many trials; the confirmation comes on top.
        least: Measure the least budget at which the schedule still runs.
        explain: Tell where the memory goes, and what would change that.
        picture: Tell what a picture of it needs, where the device can.

    Raises:
        UsageError: A number is not a whole one of at least 1, or beyond all use (a schedule lists all its parts), or
            equal parts do not divide the target, or what is True or False is something else.
    """

    target_batch: int
    options: Options = field(default_factory=Options)
    max_micro_batch: int | None = None
    max_trials: int | None = None
    least: bool = False
    explain: bool = False
    picture: bool = False

    def __post_init__(self) -> None:
        for what, number, most in (
            ("target batch", self.target_batch, _MOST_SAMPLES),
            ("world size", self.options.world_size, _MOST_RANKS),
        ):
            if isinstance(number, int) and number > most:
                raise UsageError(f"the {what} is beyond {most:,}", hint="take a smaller one")
        self.schedule(self.each if self.max_micro_batch is None else self.max_micro_batch)
        if self.max_trials is not None:
            read_count(self.max_trials, "max_trials")
        for name in ("least", "explain", "picture"):
            check_flag(getattr(self, name), name)

    @property
    def share(self) -> int:
        """Samples per update on the rank with the longest share."""
        return even_parts(self.target_batch // self.each, self.options.world_size)[0] * self.each

    @property
    def each(self) -> int:
        """What every micro-batch is a multiple of, as far as that is known."""
        return self.options.multiple_of or 1

    @property
    def limited(self) -> bool:
        """Whether something may end the search before it knows the largest size."""
        return self.max_trials is not None or self.options.time_limit is not None

    @property
    def load_limit_seconds(self) -> float | None:
        """Seconds that loading the workload may take, and checking it; None: no limit but those of every trial."""
        limit = self.options.time_limit
        return None if limit is None else max(limit, _LEAST_CHECK_SECONDS)

    @property
    def cap(self) -> int:
        """The largest size worth trying."""
        most = min(self.share, self.max_micro_batch or self.share)
        return most - most % self.each

    def schedule(self, ceiling: int) -> Schedule:
        """How the target is cut when the largest size that fits is `ceiling`."""
        return make_schedule(
            self.target_batch,
            ceiling,
            world_size=self.options.world_size,
            equal=self.options.equal,
            multiple_of=self.each,
        )
