"""Compute micro-batch sizes from a target batch, the largest that fits and a number of ranks, in pure integers.

The rule is to take the fewest micro-batches that fit, and to divide the target evenly among them. Micro-batches of
the largest size only would silently train another batch size (64 // 24 = 2 micro-batches of 24 are 48 samples).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import isqrt
from operator import index
from typing import Final, TypeVar

from autoaccum.checks import read_count
from autoaccum.errors import UsageError

_NEARBY: Final = 0.05
"""The share of a target by which a nearby one may differ."""


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of one update on every rank.

    Attributes:
        ranks: For each rank, the sizes of its micro-batches in samples, in order. Every rank runs the same number of
            micro-batches, so that collectives match; one with few samples may run a micro-batch of 0 samples.

    Raises:
        UsageError: There is no rank or no part, ranks differ in their number of parts, or there is no sample.

    >>> Schedule(((86, 85, 85),)).iter_size
    3
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        is_even = len({len(parts) for parts in self.ranks}) == 1 and len(self.ranks[0]) > 0
        if not is_even or min(map(min, self.ranks)) < 0 or self.micro_batch < 1:
            raise UsageError(
                f"a schedule of micro-batches {self.ranks}",
                hint="every rank runs the same number of parts, and one of them holds a sample",
            )

    @property
    def target_batch(self) -> int:
        """The number of samples per update, over all ranks."""
        return sum(sum(parts) for parts in self.ranks)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def iter_size(self) -> int:
        """The number of micro-batches per update, the same on every rank."""
        return len(self.ranks[0])

    @property
    def micro_batch(self) -> int:
        """The largest part of any rank, in samples."""
        return max(max(parts) for parts in self.ranks)

    @property
    def smallest_part(self) -> int:
        """The smallest part of any rank, leaving out parts of 0 samples."""
        return min(part for parts in self.ranks for part in parts if part)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The parts of the rank with the most samples."""
        return max(self.ranks, key=sum)

    @property
    def trial_parts(self) -> tuple[int, ...]:
        """The parts that a trial runs to measure an update's memory on any rank: the largest and the smallest.

        The largest part runs twice if it does so on a rank, since memory peaks at its second run, when the gradients of
        the first exist.

        >>> [make_schedule(*sizes).trial_parts for sizes in ((4, 4), (12, 4), (7, 4), (14, 4))]
        [(4,), (4, 4), (4, 3), (4, 4, 3)]
        >>> make_schedule(7, 2, world_size=2).trial_parts
        (2, 2, 1)
        """
        largest, smallest = self.micro_batch, self.smallest_part
        if self.iter_size == 1:
            return (largest,)
        repeats_largest = smallest < largest and any(rank.count(largest) > 1 for rank in self.ranks)
        return (largest, largest, smallest) if repeats_largest else (largest, smallest)


def make_schedule(
    target_batch: int, largest_fit: int, *, world_size: int = 1, equal: bool = False, multiple_of: int = 1
) -> Schedule:
    """Cut `target_batch` samples into the fewest micro-batches of at most `largest_fit` samples.

    Args:
        target_batch: The number of samples per update, over all ranks.
        largest_fit: The largest micro-batch that fits, in samples.
        world_size: The number of ranks that share the target; their samples differ by at most `multiple_of`.
        equal: Whether all parts of all ranks have one size: the largest divisor of a rank's samples that fits.
        multiple_of: The number that every part is a multiple of.

    Raises:
        UsageError: An argument is not a whole number of at least 1, the target is no multiple of `multiple_of`, less
            than that fits, or parts are to be `equal` and the target is not divisible by the number of ranks.

    >>> make_schedule(256, 100).ranks
    ((86, 85, 85),)
    >>> make_schedule(256, 100, equal=True).micro_batches
    (64, 64, 64, 64)
    >>> make_schedule(7, 2, world_size=2).ranks
    ((2, 2), (2, 1))
    >>> make_schedule(12, 5, multiple_of=2).micro_batches
    (4, 4, 4)
    """
    target_batch, world_size = read_count(target_batch, "the target batch"), read_count(world_size, "the world size")
    most = _count_units(largest_fit, multiple_of)
    check_multiple(target_batch, multiple_of, "the target batch")
    rank_units = even_parts(target_batch // multiple_of, world_size)
    if equal and rank_units[0] != rank_units[-1]:
        step = world_size * multiple_of
        below = target_batch - target_batch % step
        nearest = [multiple for multiple in (below, below + step) if multiple]
        raise UsageError(
            f"a target batch of {target_batch} does not divide equally over {world_size} ranks",
            hint=f"take {' or '.join(map(str, nearest))}, or allow uneven shares (without --equal or --for)",
        )
    largest = part_sizes(rank_units[0], most, equal=True)[-1] if equal else most
    iter_size = -(-rank_units[0] // largest)
    return Schedule(tuple(tuple(part * multiple_of for part in even_parts(units, iter_size)) for units in rank_units))


def part_sizes(rank_samples: int, most: int, *, equal: bool = False, multiple_of: int = 1) -> list[int]:
    """Return every size that the largest micro-batch can have, up to `most`, in ascending order.

    Whatever fits between two of them gives the same schedule: 12 samples in parts of at most 6 to 11 are 6 + 6.

    Args:
        rank_samples: The samples per update of the rank with the most, a multiple of `multiple_of`.
        most: The largest size, in samples.
        equal: Whether all parts have one size.
        multiple_of: The number that every part is a multiple of.

    >>> part_sizes(12, 12), part_sizes(12, 5, equal=True), part_sizes(12, 12, multiple_of=4)
    ([1, 2, 3, 4, 6, 12], [1, 2, 3, 4], [4, 8, 12])
    """
    units = rank_samples // multiple_of
    # Below the square root the sizes of neighbouring numbers of parts differ by at most one, so that there is each.
    few = range(1, isqrt(units) + 1)
    if equal:
        sizes = {size for count in few if units % count == 0 for size in (count, units // count)}
    else:
        sizes = {*few, *(-(-units // count) for count in (*few, few.stop))}
    return [size * multiple_of for size in sorted(sizes) if size * multiple_of <= most]


def has_coarse_parts(share: int) -> bool:
    """Return whether equal parts of `share` samples leave such gaps that the largest size that fits is worth knowing.

    >>> has_coarse_parts(256), has_coarse_parts(257)
    (False, True)
    """
    return any(large > 2 * small for small, large in pairwise(part_sizes(share, share, equal=True)))


def check_multiple(samples: int, multiple_of: int, what: str) -> None:
    """Raise UsageError if `samples`, called `what` in messages, is no multiple of `multiple_of`."""
    if samples % multiple_of:
        below = samples - samples % multiple_of
        near = f"{below} or {below + multiple_of}" if below else f"{multiple_of}"
        raise UsageError(
            f"{what} is {samples}, and micro-batches are to be multiples of {multiple_of}", hint=f"take {near}"
        )


def split_evenly(samples: int, most: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Split one rank's `samples` evenly into the fewest parts of at most `most` samples each.

    Every part is a multiple of `multiple_of`, except for a last part with the remainder.

    Raises:
        UsageError: An argument is not a whole number of at least 1, or `most` is below `multiple_of`.

    >>> split_evenly(256, 100)
    (86, 85, 85)
    >>> split_evenly(5, 8)
    (5,)
    >>> split_evenly(15, 6, multiple_of=2)
    (6, 4, 4, 1)
    """
    most = _count_units(most, multiple_of)
    units, rest = divmod(read_count(samples, "the number of samples"), multiple_of)
    parts = even_parts(units, -(-units // most)) if units else ()
    return (*(part * multiple_of for part in parts), *((rest,) if rest else ()))


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """Return `count` parts that add up to `total` and differ by at most one, the larger ones first.

    Raises:
        UsageError: `count` is not a whole number of at least 1, or `total` not one of at least 0.

    >>> even_parts(10, 4)
    (3, 3, 2, 2)
    >>> even_parts(1, 3)
    (1, 0, 0)
    """
    total, count = read_count(total, "the total", least=0), read_count(count, "the number of parts")
    each, larger = divmod(total, count)
    return (each + 1,) * larger + (each,) * (count - larger)


def slices(counts: Iterable[int]) -> list[slice]:
    """Return where each of consecutive runs of `counts` entries lies.

    >>> slices([2, 0, 1])
    [slice(0, 2, None), slice(2, 2, None), slice(2, 3, None)]
    """
    return [slice(one, two) for one, two in pairwise(accumulate(counts, initial=0))]


def fewer_parts(schedule: Schedule, largest_fit: int, multiple_of: int = 1) -> Schedule | None:
    """Return the schedule of uneven parts if equal ones need at least twice as many micro-batches, else None.

    >>> fewer_parts(make_schedule(257, 100, equal=True), 100).micro_batches
    (86, 86, 85)
    >>> fewer_parts(make_schedule(256, 100, equal=True), 100)
    """
    uneven = make_schedule(schedule.target_batch, largest_fit, world_size=schedule.world_size, multiple_of=multiple_of)
    return uneven if schedule.iter_size >= 2 * uneven.iter_size else None


def nearby_target(schedule: Schedule, most: int, multiple_of: int = 1) -> tuple[int, int] | None:
    """Return the next larger size of equal parts, and the nearest target within 5 % without such a gap below it.

    None if no size of at most `most` samples is more than twice that of the schedule, or the next one is not.

    >>> nearby_target(make_schedule(257, 100, equal=True), 100)
    (257, 256)
    >>> nearby_target(make_schedule(256, 100, equal=True), 100)
    """
    share = sum(schedule.micro_batches)
    sizes = part_sizes(share, share, equal=True, multiple_of=multiple_of)
    above = next((size for size in sizes if size > schedule.micro_batch), 0)
    if min(above, most) <= 2 * schedule.micro_batch:
        return None
    units = share // multiple_of
    near = (units + sign * steps for steps in range(1, int(_NEARBY * units) + 1) for sign in (-1, 1))
    found = next((each for each in near if not has_coarse_parts(each)), None)
    return None if found is None else (above, found * multiple_of * schedule.world_size)


def _count_units(most: int, multiple_of: int) -> int:
    """Return how many multiples of `multiple_of` a micro-batch of at most `most` samples can hold; check both."""
    most, multiple_of = read_count(most, "the largest micro-batch"), read_count(multiple_of, "the multiple")
    if most < multiple_of:
        raise UsageError(
            f"micro-batches of at most {most} are to be multiples of {multiple_of}", hint=f"allow {multiple_of} or more"
        )
    return most // multiple_of


Batch = TypeVar("Batch")


def windows(loader: Iterable[Batch], iter_size: int) -> Iterator[list[Batch]]:
    """Group the batches of `loader` into lists of `iter_size`; the last list may be shorter.

    The lists are made for `Accumulator.step_parts`, which weights a short one correctly. Batches are fetched when their
    list is requested, not ahead.

    Raises:
        UsageError: `iter_size` is not at least 1.

    Examples:
        >>> list(windows("abcde", 2))
        [['a', 'b'], ['c', 'd'], ['e']]
    """
    if index(iter_size) < 1:
        raise UsageError(f"iter_size is {iter_size}", hint="use at least 1 micro-batch per update")
    batches = iter(loader)
    return iter(lambda: list(islice(batches, iter_size)), [])
