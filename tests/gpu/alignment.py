"""Pairs of simulated and measured blocks: which rule predicts which block, and which blocks no rule predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

TENSOR = "tensor"
_GRAIN = 512


@dataclass(frozen=True)
class Expected:
    """A block of a simulation.

    Attributes:
        rule: A rule of `workspace_rules.RULES`; `tensor` for an output of an operator.
        numbers: The arguments of the rule; none for a tensor.
        bytes: The predicted size; 0 if the rule predicts no block.
        band_bytes: The uncertainty of the prediction.
    """

    rule: str
    numbers: tuple[int, ...]
    bytes: int
    band_bytes: int = 0


@dataclass(frozen=True)
class Pair:
    """A block of the simulation and one of the card; either may be missing.

    Attributes:
        expected: The simulated block.
        measured_bytes: The size of the card's block.
        position: The index among the card's blocks, or the one where it would be.
    """

    expected: Expected | None
    measured_bytes: int | None
    position: int

    @property
    def agrees(self) -> bool:
        """Return whether both have the same size; a missing block has 0 bytes."""
        return (0 if self.expected is None else self.expected.bytes) == (self.measured_bytes or 0)


def align(expected: Sequence[Expected], measured: Sequence[int]) -> list[Pair]:
    """Pair blocks in the order of their requests: first those of equal size, then those between them.

    >>> small, large = Expected("tensor", (), 512), Expected("sort", (8,), 64)
    >>> [(pair.expected.rule, pair.measured_bytes) for pair in align([small, large], [512, 80])]
    [('tensor', 512), ('sort', 80)]
    """
    sizes, pairs, done, taken = [block.bytes for block in expected], list[Pair](), 0, 0
    runs = SequenceMatcher(None, sizes, measured, autojunk=False).get_matching_blocks()
    common = [(run.a + at, run.b + at) for run in runs for at in range(run.size)]
    for ours, theirs in [*common, (len(expected), len(measured))]:
        pairs += _pair_up(list(expected[done:ours]), list(measured[taken:theirs]), taken)
        if ours < len(expected):
            pairs.append(Pair(expected[ours], measured[theirs], theirs))
        done, taken = ours + 1, theirs + 1
    return pairs


def _pair_up(expected: list[Expected], measured: list[int], start: int) -> Iterator[Pair]:
    """Pair in order; if the card has fewer blocks, those of 0 bytes stay unpaired first, then other workspaces."""
    surplus = len(expected) - len(measured)
    idle: list[Expected] = []
    for may_go in (lambda block: block.bytes == 0, lambda block: block.rule != TENSOR, lambda block: True):
        for block in [block for block in expected if may_go(block)]:
            if len(idle) < surplus:
                expected.remove(block)
                idle.append(block)
    for at, (block, size) in enumerate(zip_longest(expected, measured)):
        yield Pair(block, size, start + at)
    for block in idle:
        yield Pair(block, None, start + len(measured))


def peak_bytes(events: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the peak of the bytes in blocks, each rounded up to 512 bytes.

    Args:
        events: The number of a block that is allocated, or `~number` of one that is freed; others are not counted.
        sizes: By block, in bytes.

    >>> peak_bytes((0, 1, ~1, 2), (512, 1, 600))
    1536
    """
    held = most = 0
    alive: set[int] = set()
    for event in events:
        if event >= 0:
            alive.add(event)
            held += -(-sizes[event] // _GRAIN) * _GRAIN
        elif ~event in alive:
            alive.remove(~event)
            held -= -(-sizes[~event] // _GRAIN) * _GRAIN
        most = max(most, held)
    return most
