"""What several numbers of ranks would train: a row for each, and the least that trains the model at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoaccum.devices.base import Trial
from autoaccum.errors import DoesNotFitError
from autoaccum.options import Parallel, Reduce
from autoaccum.planning.plan_events import Event, Listener, TrialFinished
from autoaccum.planning.plan_messages import peak_bytes
from autoaccum.planning.plan_record import Plan


@dataclass(frozen=True, kw_only=True)
class WorldSize:
    """A number of ranks, and the plan for it in short.

    Attributes:
        world_size: The number of ranks.
        fits: Whether each can train at all; if not, the fields of a plan are None.
        micro_batch, iter_size, parallel, reduce, least_bytes: As in `Plan`.
        peak_bytes: As in `Plan`; where nothing fits, what the smallest trial would take, if it is known.
        limit_bytes: The budget of each rank.
        message: Why nothing fits.
        warnings: As in `Plan`.
    """

    world_size: int
    fits: bool
    micro_batch: int | None = None
    iter_size: int | None = None
    parallel: Parallel | None = None
    reduce: Reduce | None = None
    least_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    message: str | None = None
    warnings: tuple[str, ...] = ()


def choose_world_sizes(within: range) -> list[int]:
    """Return the powers of two within a range of numbers of ranks, and its ends.

    >>> choose_world_sizes(range(1, 65)), choose_world_sizes(range(3, 13))
    ([1, 2, 4, 8, 16, 32, 64], [3, 4, 8, 12])
    """
    powers = [1 << exponent for exponent in range(within[-1].bit_length())]
    return sorted({within[0], within[-1], *(power for power in powers if power in within)})


def compare_world_sizes(
    plan: Callable[[int, Listener], Plan],
    sizes: Iterable[int],
    on_row: Callable[[WorldSize], None] = lambda row: None,
) -> list[WorldSize]:
    """Plan for each number of ranks, and between those where the model begins to fit for the least that does.

    Args:
        plan: Plans for so many ranks, and tells the listener of its trials.
        sizes: The numbers of ranks.
        on_row: Called with each row as it is found.

    Raises:
        AutoaccumError: As `plan`, but for `DoesNotFitError`, which is a row.
    """
    rows: dict[int, WorldSize] = {}

    def add(size: int) -> None:
        rows[size] = _try_size(plan, size)
        on_row(rows[size])

    for size in sizes:
        add(size)
    while least := find_least(list(rows.values())):
        below = max((size for size in rows if size < least), default=least - 1)
        if least - below == 1:
            break
        add((below + least) // 2)
    return [rows[size] for size in sorted(rows)]


def find_least(rows: Sequence[WorldSize]) -> int | None:
    """Return the least number of ranks that trains the model; None where none does."""
    return min((row.world_size for row in rows if row.fits), default=None)


def _try_size(plan: Callable[[int, Listener], Plan], size: int) -> WorldSize:
    trials: list[Trial] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            trials.append(event.trial)

    try:
        found = plan(size, listen)
    except DoesNotFitError as error:
        peaks = [peak for trial in trials if (peak := peak_bytes(trial)) is not None]
        return WorldSize(world_size=size, fits=False, peak_bytes=min(peaks, default=None), message=error.message)
    return WorldSize(
        world_size=size,
        fits=True,
        micro_batch=found.micro_batch,
        iter_size=found.iter_size,
        parallel=found.parallel,
        reduce=found.reduce,
        least_bytes=found.least_bytes,
        peak_bytes=found.peak_bytes,
        limit_bytes=found.limit_bytes,
        warnings=found.warnings,
    )
