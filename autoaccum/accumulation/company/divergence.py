"""Which modules give a sample another output in other company: a batch is run whole, and in two parts.

In the parts' runs, whatever differs from the whole's rows is exchanged for them, right where it differs: every module
is given what it was given in the whole run, and only that is found whose own code depends on the company.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from autoaccum.accumulation.company.agreement import Match, match
from autoaccum.accumulation.company.module_calls import Call, Measurer, Recorder, exchange, floating, standing_in

Spot = tuple[Call, Literal["in", "out"], int]
"""A tensor of a run: the n-th that went into a call, or came out of it."""


@dataclass
class Divergence:
    """What the parts' runs have shown, beside the whole's.

    Attributes:
        whole: What was recorded of the whole run.
        sizes: Samples of the two parts.
        alone: The shapes in each part's own run.
        matches: What was found in each part, by spot.
        unmatched: Modules that were called another number of times, so that their calls cannot be told apart.
    """

    whole: Recorder
    sizes: Sequence[int]
    alone: tuple[Measurer, Measurer] = field(default_factory=lambda: (Measurer(), Measurer()))
    matches: tuple[dict[Spot, Match], dict[Spot, Match]] = field(default_factory=lambda: ({}, {}))
    unmatched: set[str] = field(default_factory=set)

    def coupled(self) -> tuple[Call | None, ...]:
        """The calls whose own code couples samples, one for each module, in the order they were made.

        None stands for the loss: what it gave to a module depends on the company.
        """
        found: dict[str | None, Call | None] = {}
        for spot in dict.fromkeys((*self.matches[0], *self.matches[1])):
            call, slot, _ = spot
            if call.name not in self.unmatched and self._differs(spot):
                blamed = call.caller if slot == "in" else call
                found.setdefault(None if blamed is None else blamed.name, blamed)
        return tuple(found.values())

    def pairs(self) -> set[str]:
        """Modules that give a table of all samples by all samples."""
        one, other = (
            {call.name for (call, slot, _), found in matches.items() if slot == "out" and found.state == "square"}
            for matches in self.matches
        )
        return one & other

    def rows(self, call: Call, index: int) -> tuple[Tensor, Match, Match] | None:
        """An output tensor of the whole run, and where the two parts' rows lie in it; None where they do not."""
        first, second = (found.get((call, "out", index)) for found in self.matches)
        if first is None or second is None or first.positions is None or second.positions is None:
            return None
        is_told = first.dim == second.dim and call.name not in self.unmatched
        return (self.whole.outputs[call][index], first, second) if is_told else None

    def _differs(self, spot: Spot) -> bool:
        found = [match for match in (self.matches[0].get(spot), self.matches[1].get(spot)) if match is not None]
        if found and all(match.state == "square" for match in found):
            return len(found) == 2  # In one part alone, it may be padding that is shorter by the same factor.
        return any(match.state == "differ" for match in found) and self._adds_up(spot, found)

    def _adds_up(self, spot: Spot, found: Sequence[Match]) -> bool:
        """Whether all rows of the whole are in the parts: as many are those of samples, not of something else."""
        positioned = [match for match in found if match.positions is not None]
        if not positioned:
            return True
        call, slot, index = spot
        whole = (self.whole.inputs if slot == "in" else self.whole.outputs)[call][index]
        rows = whole.shape[positioned[0].dim]
        lengths = [len(match.positions) for match in positioned if match.positions is not None]
        if len(lengths) == 2:
            return sum(lengths) == rows
        return False


class Comparer:
    """Follows the run of a part, holds it against the whole's, and exchanges what differs."""

    def __init__(self, divergence: Divergence, index: int) -> None:
        self._whole, self._sizes, self._index = divergence.whole, divergence.sizes, index
        self._other = divergence.alone[1 - index]
        self._found = divergence.matches[index]
        self._seen: dict[Call, dict[int, Tensor]] = {}
        self._counting = Recorder()
        self._unmatched = divergence.unmatched

    def entered(self, call: Call, arguments: Any) -> Any:
        """Compare the arguments."""
        self._counting.inputs[call] = []
        return self._compare(call, "in", arguments, self._whole.inputs, self._other.inputs)

    def left(self, call: Call, output: Any) -> Any:
        """Compare the output."""
        return self._compare(call, "out", output, self._whole.outputs, self._other.outputs)

    def finish(self) -> None:
        """Find the modules that were called more or less often than in the whole run."""
        own, all_counts = self._counting.counts(), self._whole.counts()
        self._unmatched.update(name for name in own.keys() | all_counts.keys() if own[name] != all_counts[name])

    def _compare(
        self,
        call: Call,
        slot: Literal["in", "out"],
        nest: Any,
        recorded: Mapping[Call, list[Tensor]],
        measured: Mapping[Call, list[tuple[int, ...]]],
    ) -> Any:
        expected, shapes = recorded.get(call, []), measured.get(call, [])
        if len(expected) != len(floating(nest)):
            return nest
        remaining = iter(enumerate(expected))

        def compare(tensor: Tensor) -> Tensor:
            index, whole = next(remaining)
            known = self._seen.setdefault(call, {})
            other = shapes[index] if len(shapes) == len(expected) else None
            found = match(whole, tensor.detach(), self._index, self._sizes, known, other)
            self._found[call, slot, index] = found
            if found.positions is not None:
                known.setdefault(whole.shape[found.dim], found.positions)
            return tensor if found.right is None else standing_in(found.right)

        return exchange(nest, compare)
