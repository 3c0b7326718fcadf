"""Which micro-batches are worth timing: pure integers."""

from __future__ import annotations

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.errors import UsageError


def micro_batch_ladder(ceiling: int, least: int = 1, target: int | None = None) -> tuple[int, ...]:
    """Doublings of the least size that stay below the ceiling, and the ceiling itself, ascending.

    Args:
        ceiling: The largest micro-batch that fits, in samples.
        least: The smallest that the model runs: 2 where a BatchNorm refuses a single sample.
        target: Samples per update. Of sizes that cut it into as many parts, which are the same parts then, only the
            smallest is named, and none that leaves a part below `least`.

    Raises:
        UsageError: There is none: the ceiling lies below the least size, or no size cuts the target.

    >>> micro_batch_ladder(100), micro_batch_ladder(8, 2)
    ((1, 2, 4, 8, 16, 32, 64, 100), (2, 4, 8))
    >>> micro_batch_ladder(140, 16), micro_batch_ladder(140, 16, target=256)
    ((16, 32, 64, 128, 140), (16, 32, 64, 128))
    """
    if not 1 <= least <= ceiling:
        raise UsageError(
            f"micro-batches from {least} to {ceiling} are an empty range", hint="plan with more memory, or less to hold"
        )
    sizes = [least << doublings for doublings in range((ceiling // least).bit_length()) if least << doublings < ceiling]
    ladder = (*sizes, ceiling)
    return ladder if target is None else _telling(ladder, least, target)


def _telling(ladder: tuple[int, ...], least: int, target: int) -> tuple[int, ...]:
    """The sizes of a ladder that cut `target` each in a way of its own."""
    sizes: dict[int, int] = {}
    for size in ladder:
        schedule = make_schedule(target, size)
        if schedule.smallest_part >= least:
            sizes.setdefault(schedule.iter_size, size)
    if not sizes:
        raise UsageError(
            f"a target batch of {target} has no parts of {least} to {ladder[-1]} samples",
            hint=f"take a multiple of {least}",
        )
    return tuple(sizes.values())
