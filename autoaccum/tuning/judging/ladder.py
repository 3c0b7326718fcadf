"""Which micro-batches are worth timing: pure integers."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.errors import UsageError


def micro_batch_ladder(
    ceiling: int, least: int = 1, targets: Sequence[int] = (), multiple_of: int = 1
) -> tuple[int, ...]:
    """Doublings of the least size that stay below the ceiling, and the ceiling itself, ascending.

    Args:
        ceiling: The largest micro-batch that fits, in samples.
        least: The smallest that the model runs: 2 where a BatchNorm refuses a single sample.
        targets: Samples per update, ascending. Sizes that leave a part below `least` in any of them are left away,
            and so are those that cut the largest into as many parts as a smaller one: they are the same parts then.
        multiple_of: Of which `ceiling` and `least` are multiples, and all parts are to be.

    Raises:
        UsageError: There is none: the ceiling lies below the least size, or no size cuts all the targets.

    >>> micro_batch_ladder(100), micro_batch_ladder(8, 2)
    ((1, 2, 4, 8, 16, 32, 64, 100), (2, 4, 8))
    >>> micro_batch_ladder(140, 16), micro_batch_ladder(140, 16, (256,)), micro_batch_ladder(140, 16, (48, 96))
    ((16, 32, 64, 128, 140), (16, 32, 64, 128), (16, 32, 64, 96))
    """
    ceiling = min(ceiling, *targets[-1:]) if targets else ceiling
    if not 1 <= least <= ceiling:
        raise UsageError(
            f"micro-batches from {least} to {ceiling} are an empty range", hint="plan with more memory, or less to hold"
        )
    sizes = [least << doublings for doublings in range((ceiling // least).bit_length()) if least << doublings < ceiling]
    ladder = (*sizes, ceiling)
    return _telling(ladder, least, targets, multiple_of) if targets else ladder


def _telling(ladder: Sequence[int], least: int, targets: Sequence[int], multiple_of: int) -> tuple[int, ...]:
    """The sizes of a ladder that cut every target, the largest of them each in a way of its own."""
    sizes: dict[int, int] = {}
    for size in ladder:
        cuts = [make_schedule(target, size, multiple_of=multiple_of) for target in targets]
        if all(cut.smallest_part >= least for cut in cuts):
            sizes.setdefault(cuts[-1].iter_size, size)
    if not sizes:
        raise UsageError(
            f"no micro-batch of {least} to {ladder[-1]} samples cuts updates of {_listed(targets)} without a part below"
            f" {least}",
            hint=f"take multiples of {least} as target batches",
        )
    return tuple(sizes.values())


def _listed(numbers: Sequence[int]) -> str:
    """At most one joint: `3`, `3 and 6`, `3, 6 and 9`."""
    return " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
