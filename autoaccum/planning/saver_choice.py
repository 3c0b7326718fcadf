"""Choose savers, or those that no others beat: pure decisions over functions that are handed in."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations

from autoaccum.options import OFFLOADS, RECOMPUTE

Words = tuple[str, ...]
"""Savers, as `options.read_savers` returns them."""
Parts = tuple[int, ...]
_QUARTERS = 4


def choose_savers(
    offloads: Sequence[str], blocks: int, fits: Callable[[Words], bool], cost: Callable[[Words], float]
) -> Words | None:
    """Return the savers of least cost that fit: some of `offloads`, and k of `blocks` recomputed; None if none fit.

    Sets of offloads are visited by their cost without recomputation, until that exceeds the cost of the best that was
    found. For each the least k that fits is found by bisection: it ran, and k - 1 did not. So the answer is that of
    trying everything where memory falls and cost grows with each saver and each block. At most 2 + log2(blocks),
    rounded up, are tried with each set of offloads. Once recomputation alone is not enough, the offloads without
    which all other savers do not fit are found first, since every other set lacks one of them in vain.

    Args:
        offloads: The offloads that may be used, of `options.OFFLOADS`.
        blocks: The number of blocks that may be recomputed.
        fits: Tries savers.
        cost: The cost of an update with savers; infinite where they cannot be used.
    """
    fits = cache(fits)
    best, least = None, math.inf
    needed: Words = ()
    seen: set[Words] = {()}
    waiting: list[tuple[float, Words]] = [(cost(()), ())]
    while waiting:
        own_cost, offloaded = heapq.heappop(waiting)
        if own_cost >= least:
            break
        count = least_blocks(offloaded, blocks, fits) if set(needed) <= set(offloaded) else None
        if count is None and not offloaded:
            usable = tuple(word for word in offloads if math.isfinite(cost((word,))))
            most = blocks if blocks and math.isfinite(cost(with_blocks((), blocks))) else 0
            if not fits(with_blocks(usable, most)):
                return None
            needed = _needed_offloads(usable, most, fits)
        if count is not None:
            words = with_blocks(offloaded, count)
            found = cost(words) if count else own_cost
            if found < least:
                best, least = words, found
        if count == 0:
            continue  # More offloads cost more.
        for word in offloads:
            more = tuple(one for one in OFFLOADS if one in (*offloaded, word))
            if more not in seen:
                seen.add(more)
                heapq.heappush(waiting, (cost(more), more))
    return best


def _needed_offloads(offloads: Sequence[str], blocks: int, fits: Callable[[Words], bool]) -> Words:
    """Return the offloads without which not even all others fit, with all blocks recomputed."""
    without = {left: tuple(word for word in offloads if word != left) for left in offloads}
    return tuple(left for left, others in without.items() if not fits(with_blocks(others, blocks)))


def with_blocks(offloaded: Words, count: int) -> Words:
    """Return these offloads with `count` blocks recomputed.

    >>> with_blocks(("offload-optimizer",), 6), with_blocks((), 0)
    (('recompute=6', 'offload-optimizer'), ())
    """
    return (f"{RECOMPUTE}={count}", *offloaded) if count else offloaded


def format_savers(words: Words) -> str:
    """Write a set of savers, which may be empty.

    >>> format_savers(("recompute=6", "offload-optimizer")), format_savers(())
    ('recompute=6 + offload-optimizer', 'no savers')
    """
    return " + ".join(words) or "no savers"


def least_blocks(offloaded: Words, blocks: int, fits: Callable[[Words], bool]) -> int | None:
    """Return the least number of recomputed blocks that fits with these offloads; None if not even all do."""
    if fits(offloaded):
        return 0
    if not blocks or not fits(with_blocks(offloaded, blocks)):
        return None
    fails, runs = 0, blocks
    while runs - fails > 1:
        middle = (fails + runs) // 2
        if fits(with_blocks(offloaded, middle)):
            runs = middle
        else:
            fails = middle
    return runs


def list_sets(offloads: Sequence[str], blocks: int, fits: Callable[[Words], bool]) -> list[Words]:
    """Return sets of savers that fit: each subset of `offloads`, with some numbers of `blocks` recomputed.

    These are quarters of all, and the least number that fits. Savers are taken to lower the memory: with more of what
    fits, nothing is tried.

    >>> list_sets(["offload-optimizer"], 2, lambda words: "recompute=2" in words)
    [('recompute=2',), ('recompute=2', 'offload-optimizer')]
    """
    found: list[Words] = []
    for count in range(len(offloads) + 1):
        for offloaded in combinations(offloads, count):
            fits_without = any(set(words) <= set(offloaded) for words in found)
            least = 0 if fits_without else least_blocks(offloaded, blocks, fits)
            if least is not None:
                quarters = {blocks * part // _QUARTERS for part in range(_QUARTERS + 1)}
                counts = sorted({least} | {quarter for quarter in quarters if quarter > least})
                found += [with_blocks(offloaded, each) for each in counts]
    return found


def find_front(
    sets: Iterable[Words],
    seconds: Callable[[Words, Parts], float],
    largest: Callable[[Words, int], Parts | None],
    fewest: Parts,
    enough: int | None = None,
) -> dict[Words, Parts]:
    """Find the sets that no other beats: none takes at most as long with at least as large a micro-batch.

    They are visited by the least time of an update, which is that in the fewest micro-batches. What is beaten by then,
    whatever its largest micro-batch is, is not tried, and of the others only sizes above those that beat it.

    Args:
        sets: The sets of savers.
        seconds: Returns the seconds of an update by parts, which are no fewer in more parts.
        largest: Returns the parts with the largest micro-batch that fits, or None if that is not above a size.
        fewest: The parts of an update in the fewest micro-batches that may be.
        enough: Only so many of the fastest are wanted.

    Returns:
        The parts of each, the fastest first.
    """
    found: dict[Words, Parts] = {}
    for words in sorted(sets, key=lambda one: (seconds(one, fewest), len(one))):
        least = seconds(words, fewest)
        above = max((max(parts) for other, parts in found.items() if seconds(other, parts) <= least), default=0)
        known = sorted(seconds(*one) for one in found.items())
        if above >= max(fewest) or (enough and len(known) >= enough and known[enough - 1] <= least):
            break
        parts = largest(words, above)
        if parts is not None:
            found[words] = parts
    front: dict[Words, Parts] = {}
    for words, parts in sorted(found.items(), key=lambda one: (seconds(*one), -max(one[1]), len(one[0]))):
        if all(max(other) < max(parts) for other in front.values()):
            front[words] = parts
    return front
