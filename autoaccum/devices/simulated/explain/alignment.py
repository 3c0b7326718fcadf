"""Match two sequences of requests for memory from their ends: those that are equal, and those that stand apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

_MOST_EDITS: Final = 2000


def align_ends(
    recorded: Sequence[int], predicted: Sequence[int], most: int = _MOST_EDITS
) -> list[tuple[int | None, int | None]] | None:
    """Match all of `predicted` with the end of `recorded` by the fewest additions and omissions; None beyond `most`.

    The algorithm is that of E. Myers, "An O(ND) difference algorithm and its variations" (1986), from the ends on; what
    is recorded before the update costs nothing.

    Returns:
        Pairs of indices in order; None stands for no counterpart.

    >>> align_ends([7, 7, 1, 2, 9, 3], [1, 2, 3])
    [(2, 0), (3, 1), (4, None), (5, 2)]
    >>> align_ends([1, 7, 7, 2], [1, 7, 2])
    [(0, 0), (1, 1), (2, None), (3, 2)]
    """
    left, above = predicted[::-1], recorded[::-1]
    history: list[dict[int, int]] = [{1: 0}]
    for edits in range(most + 1):
        reached: dict[int, int] = {}
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(history[-1], diagonal, len(above))
            if x is None:
                continue
            while x < len(left) and x - diagonal < len(above) and left[x] == above[x - diagonal]:
                x += 1
            reached[diagonal] = x
            if x == len(left):
                pairs: list[tuple[int | None, int | None]] = [
                    (None if y is None else len(above) - 1 - y, None if x is None else len(left) - 1 - x)
                    for y, x in _trace_back(history, x, diagonal, len(above))
                ]
                _match_early(pairs, (recorded, predicted))
                return pairs
        history.append(reached)
    return None


def _step(reached: Mapping[int, int], diagonal: int, most: int) -> int | None:
    """Return the farthest x on a diagonal by one more edit; None if there is none with y up to `most`."""
    found = (reached.get(diagonal + 1), None if (x := reached.get(diagonal - 1)) is None else x + 1)
    return max((x for x in found if x is not None and x - diagonal <= most), default=None)


def _trace_back(
    history: Sequence[Mapping[int, int]], x: int, diagonal: int, most: int
) -> list[tuple[int | None, int | None]]:
    """Return the pairs (y, x) of a path to its beginning."""
    pairs: list[tuple[int | None, int | None]] = []
    for edits in range(len(history) - 1, -1, -1):
        start = _step(history[edits], diagonal, most)
        assert start is not None
        pairs += [(at - diagonal, at) for at in range(x - 1, start - 1, -1)]
        if history[edits].get(diagonal + 1) == start:
            x, diagonal = start, diagonal + 1
            pairs.append((x - diagonal, None))
        else:
            x, diagonal = start - 1, diagonal - 1
            pairs.append((None, x))
    return pairs[:-1]  # The last one leads to the beginning.


def _match_early(pairs: list[tuple[int | None, int | None]], sizes: tuple[Sequence[int], Sequence[int]]) -> None:
    """Match the first of equal requests, so that those without one come late: a copy follows what it copies."""
    for start in range(len(pairs)):
        side = 1 if pairs[start][0] is None else 0
        end = start
        while end < len(pairs) and pairs[end][1 - side] is None:
            end += 1
        if end == start or end == len(pairs):
            continue
        run = [pair[side] for pair in pairs[start : end + 1]]
        first, last = run[0], run[-1]
        if first is None or last is None or sizes[side][first] != sizes[side][last]:
            continue
        counterpart = pairs[end][1 - side]
        made = [(counterpart, first), *((None, one) for one in run[1:])]
        pairs[start : end + 1] = made if side else [(one, other) for other, one in made]


def pair_runs(pairs: Iterable[tuple[int | None, int | None]]) -> Iterator[tuple[int | None, int | None, bool]]:
    """Yield pairs and whether they are alike: as many requests as are missing stand in for these, in order."""
    for alike, run in groupby(pairs, key=lambda pair: None not in pair):
        if alike:
            yield from ((one, other, True) for one, other in run)
            continue
        members = list(run)
        ones = [one for one, _ in members if one is not None]
        others = [other for _, other in members if other is not None]
        if len(ones) == len(others):
            members = list(zip(ones, others, strict=True))
        yield from ((one, other, False) for one, other in members)
