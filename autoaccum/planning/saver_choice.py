"""Choose the least costly savers that make a size fit: pure decisions over functions that are handed in."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from autoaccum.options import OFFLOADS, RECOMPUTE

Words = tuple[str, ...]
"""Savers, as `options.read_savers` returns them."""


def choose_savers(
    offloads: Sequence[str], blocks: int, fits: Callable[[Words], bool], cost: Callable[[Words], float]
) -> Words | None:
    """Return the savers of least cost that fit: some of `offloads`, and k of `blocks` recomputed; None if none fit.

    Sets of offloads are visited by their cost without recomputation, until that exceeds the cost of the best that was
    found. For each the least k that fits is found by bisection: it ran, and k - 1 did not. So the answer is that of
    trying everything where memory falls and cost grows with each saver and each block. At most 2 + log2(blocks),
    rounded up, are tried with each set of offloads.

    Args:
        offloads: The offloads that may be used, of `options.OFFLOADS`.
        blocks: The number of blocks that may be recomputed.
        fits: Tries savers.
        cost: The cost of an update with savers; infinite where they cannot be used.
    """
    best, least = None, math.inf
    seen: set[Words] = {()}
    waiting: list[tuple[float, Words]] = [(cost(()), ())]
    while waiting:
        own_cost, offloaded = heapq.heappop(waiting)
        if own_cost >= least:
            break
        count = _least_blocks(offloaded, blocks, fits)
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


def with_blocks(offloaded: Words, count: int) -> Words:
    """Return these offloads with `count` blocks recomputed.

    >>> with_blocks(("offload-optimizer",), 6), with_blocks((), 0)
    (('recompute=6', 'offload-optimizer'), ())
    """
    return (f"{RECOMPUTE}={count}", *offloaded) if count else offloaded


def _least_blocks(offloaded: Words, blocks: int, fits: Callable[[Words], bool]) -> int | None:
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
