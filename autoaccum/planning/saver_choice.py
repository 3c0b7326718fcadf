"""Choose savers, or those that no others beat: pure decisions over functions that are handed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations

from autoaccum.options import RECOMPUTE

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
    trying everything where memory falls and cost grows with each saver and each block.

    Args:
        offloads: The offloads that may be used, of `options.OFFLOADS`.
        blocks: The number of blocks that may be recomputed.
        fits: Tries savers.
        cost: The cost of an update with savers; infinite where they cannot be used.
    """
    fits = cache(fits)
    if fits(()):
        return ()
    usable = tuple(word for word in offloads if math.isfinite(cost((word,))))
    blocks = blocks if blocks and math.isfinite(cost(with_blocks((), blocks))) else 0
    if least_blocks((), blocks, fits) is None and not fits(with_blocks(usable, blocks)):
        return None
    best, least = None, math.inf
    for offloaded in sorted(_subsets(usable), key=lambda words: (cost(words), len(words))):
        if cost(offloaded) >= least:
            break
        count = least_blocks(offloaded, blocks, fits)
        words = offloaded if count is None else with_blocks(offloaded, count)
        if count is not None and cost(words) < least:
            best, least = words, cost(words)
    return best


def _subsets(offloads: Sequence[str]) -> list[Words]:
    """Return all subsets, the smallest first."""
    return [words for count in range(len(offloads) + 1) for words in combinations(offloads, count)]


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
    quarters = [blocks * part // _QUARTERS for part in range(_QUARTERS + 1)]
    for offloaded in _subsets(offloads):
        fits_without = any(set(words) <= set(offloaded) for words in found)
        least = 0 if fits_without else least_blocks(offloaded, blocks, fits)
        if least is not None:
            counts = sorted({least, *(quarter for quarter in quarters if quarter > least)})
            found += [with_blocks(offloaded, count) for count in counts]
    return found


def find_front(
    sets: Iterable[Words],
    seconds: Callable[[Words, Parts], float],
    largest: Callable[[Words, int], Parts | None],
    fewest: Parts,
) -> dict[Words, Parts]:
    """Find the sets that no other beats: none takes at most as long with at least as large a micro-batch.

    They are visited by the least time of an update, which is that in the fewest micro-batches. What is beaten by then,
    whatever its largest micro-batch is, is not tried, and of the others only sizes above those that beat it.

    Args:
        sets: The sets of savers.
        seconds: Returns the seconds of an update by parts, which are no fewer in more parts.
        largest: Returns the parts with the largest micro-batch that fits, or None if that is not above a size.
        fewest: The parts of an update in the fewest micro-batches that may be.

    Returns:
        The parts of each, the fastest first.
    """
    tried: dict[Words, Parts] = {}
    for words in sorted(sets, key=lambda words: (seconds(words, fewest), len(words))):
        least = seconds(words, fewest)
        above = max((max(parts) for other, parts in tried.items() if seconds(other, parts) <= least), default=0)
        if above >= max(fewest):
            break
        parts = largest(words, above)
        if parts is not None:
            tried[words] = parts
    front: dict[Words, Parts] = {}
    for words, parts in sorted(tried.items(), key=lambda item: (seconds(*item), -max(item[1]), len(item[0]))):
        if all(max(other) < max(parts) for other in front.values()):
            front[words] = parts
    return front
