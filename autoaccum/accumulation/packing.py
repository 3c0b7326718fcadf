"""Pack samples of unequal length into few micro-batches within a token budget, in pure integers.

A micro-batch that is padded to its longest sample costs that length times its samples; one that is packed without
padding costs the sum of its lengths. A sample is never split: one that costs more than the budget runs alone. Every
length is at least 1.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from autoaccum.checks import read_count
from autoaccum.errors import UsageError
from autoaccum.spec import Padding

Sample = TypeVar("Sample")
PRICE_SHARE = 16
"""The fixed cost of a micro-batch, as a share of the budget (1/16): without it, packing would trade many tiny
micro-batches for a little padding."""


def part_cost(lengths: Sequence[int], padding: Padding = "longest") -> int:
    """Return what a micro-batch of samples with these lengths costs, in tokens.

    >>> part_cost([5, 3, 1]), part_cost([5, 3, 1], "none")
    (15, 9)
    """
    return sum(lengths) if padding == "none" else max(lengths, default=0) * len(lengths)


def pack(
    lengths: Sequence[int], micro_tokens: int, padding: Padding = "longest", share: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the indices of the samples of each micro-batch, the longest first; of a `share` of all, if given.

    With padding, samples of similar length go together, so that padded tokens and a fixed cost of each micro-batch
    (`PRICE_SHARE`) are least in sum. Without, each sample goes where the least room is left that takes it (best-fit
    decreasing: at most 11/9 of the fewest micro-batches, and one more).

    Raises:
        UsageError: `micro_tokens` is not a whole number of at least 1.

    >>> pack([3, 9, 4, 4], 9), pack([3, 9, 4, 2], 9, "none")
    ([[1], [2, 3], [0]], [[1], [2, 0, 3]])
    """
    read_count(micro_tokens, "micro_tokens")
    order = sorted(range(len(lengths)) if share is None else share, key=lambda index: -lengths[index])
    if padding == "none":
        return _fill_best(order, lengths, micro_tokens)
    ends = _cut_sorted([lengths[index] for index in order], micro_tokens)
    return [order[start:end] for start, end in pairwise([0, *ends])]


def _cut_sorted(lengths: Sequence[int], micro_tokens: int) -> list[int]:
    """Return where the parts of samples end, which are sorted from the longest on (dynamic programming)."""
    price, last = math.ceil(micro_tokens / PRICE_SHARE), len(lengths)
    least, starts = [0, *[-1] * last], [0] * (last + 1)
    """By the number of samples, the price of the first ones (-1: not known), and where the last part of them starts."""
    shorter = [at for at in range(1, last) if lengths[at] < lengths[at - 1]]  # Cuts between equal samples save nothing.
    for start, length in enumerate(lengths):
        if least[start] < 0:
            continue
        most = min(last, start + max(1, micro_tokens // length))
        for end in (*shorter[bisect_right(shorter, start) : bisect_left(shorter, most)], most):
            middle = (start + end) // 2
            if middle > start and (length - lengths[middle]) * (end - middle) > price:
                break  # Two parts cost less than this one, and than any larger one from here.
            total = least[start] + length * (end - start) + price
            if not 0 <= least[end] <= total:
                least[end], starts[end] = total, start
    ends = []
    while last:
        ends.append(last)
        last = starts[last]
    return ends[::-1]


def _fill_best(order: Sequence[int], lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """The tokens that are left of each part and the part, ascending."""
    for index in order:
        length = lengths[index]
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            room, part = micro_tokens, len(parts)
            parts.append([])
        else:
            room, part = rooms.pop(at)
        parts[part].append(index)
        insort(rooms, (room - length, part))
    return parts


def pack_in_order(lengths: Sequence[int], micro_tokens: int, padding: Padding = "longest") -> list[int]:
    """Return the numbers of samples of the fewest micro-batches that keep the order of the samples.

    >>> pack_in_order([3, 9, 4, 4], 9)
    [1, 1, 2]
    """
    sizes: list[int] = []
    size = longest = total = 0
    for length in lengths:
        size, longest, total = size + 1, max(longest, length), total + length
        if size > 1 and (total if padding == "none" else longest * size) > micro_tokens:
            sizes.append(size - 1)
            size, longest, total = 1, length, length
    return [*sizes, size] if size else sizes


def share_by_length(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the samples of each rank, so that ranks have about as many tokens, not samples.

    From the longest on, each sample goes to the rank with the fewest tokens so far.

    >>> share_by_length([9, 4, 3, 2], 2)
    [[0], [1, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def check_target(target_batch: int | None, target_tokens: int | None) -> None:
    """Raise UsageError unless either the samples or the tokens of an update are given."""
    if target_batch is None and target_tokens is None:
        raise UsageError("no target", hint="give target_batch (--target-batch) or target_tokens (--target-tokens)")
    if target_batch is not None and target_tokens is not None:
        raise UsageError("both target_batch and target_tokens are given", hint="give one")


def cut_windows(
    samples: Iterable[tuple[Sample, int]], target_batch: int | None, target_tokens: int | None
) -> Iterator[list[tuple[Sample, int]]]:
    """Cut samples with their lengths into windows, each of which is one update; the last one may be smaller.

    A window has as many whole samples as reach `target_tokens`, or, if that is None, `target_batch` samples.

    >>> [len(window) for window in cut_windows([("a", 3), ("b", 9), ("c", 4)], None, 4)]
    [2, 1]
    """
    window: list[tuple[Sample, int]] = []
    tokens = 0
    for sample, length in samples:
        window.append((sample, length))
        tokens += length
        if len(window) == target_batch if target_tokens is None else tokens >= target_tokens:
            yield window
            window, tokens = [], 0
    if window:
        yield window
