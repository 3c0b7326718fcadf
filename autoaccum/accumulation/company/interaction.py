"""Does a loss mix samples? Some rows of the model's outputs are moved, others, and both: a sum has no interaction.

What else the batch holds of the others must not matter either, but for the number that a mean divides by: whatever is
moved in a sample's outputs, the loss then changes by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoaccum.accumulation.company.divergence import Divergence
from autoaccum.accumulation.company.module_calls import Call, exchange, floating, standing_in

Moves: TypeAlias = "dict[tuple[Call, int], Tensor]"
Terms: TypeAlias = "Mapping[str, float]"
_Move: TypeAlias = "Callable[[Tensor, int, int], Tensor]"

_DEPTHS = 3
_LEVELS = {torch.float64: (1e-6, 1e-13), torch.float32: (2e-3, 1e-6)}
_HALF_LEVEL = (1e-1, 2e-2)
"""What counts as an interaction: a share of the largest change, and rounding, a share of the loss."""


class Mover:
    """Follows a run and has the calls of one depth give what is in `moves`, in place of what they computed.

    Attributes:
        missed: How many tensors of `moves` have found no place.
    """

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self.missed = len(moves)

    def entered(self, call: Call, arguments: Any) -> Any:
        """Nothing is changed here."""
        return arguments

    def left(self, call: Call, output: Any) -> Any:
        """Exchange the tensors that are in `moves`."""
        indices = iter(range(len(floating(output))))

        def move(tensor: Tensor) -> Tensor:
            moved = self._moves.get((call, next(indices)))
            if moved is None or moved.shape != tensor.shape:
                return tensor
            self.missed -= 1
            return standing_in(moved)

        return exchange(output, move)


class Interactions:
    """What runs of a whole batch show of its loss.

    Args:
        run: Gives the terms of the loss of the whole batch, or of another one, followed by a `Mover`, draws held
            alike.
        still: Those terms where nothing is moved.
        divergence: What tells where rows lie.
        dtype: Of the loss.
    """

    def __init__(
        self,
        run: Callable[[Mover, Any], Terms],
        still: Terms,
        divergence: Divergence,
        dtype: torch.dtype,
    ) -> None:
        self._run, self._still, self._divergence, self._dtype = run, still, divergence, dtype
        self._spots: list[tuple[Call, int]] = []

    def mixes_rows(self, coupled: Collection[str]) -> bool | None:
        """Whether the loss mixes the rows of the model's outputs; None: that could not be told.

        What the outermost calls return is moved. Where that does not change the loss, as where the model itself
        computes it, what the calls within those return is moved. A term that a model keeps as an attribute is not
        seen.

        Args:
            coupled: Modules known to couple samples: below them, it is not the loss that would be seen.
        """
        outputs = self._divergence.whole.outputs
        for depth in range(_DEPTHS):
            calls = [call for call in outputs if call.depth == depth]
            if any(outer.name in coupled for call in calls for outer in call.callers):
                return None
            self._spots = [(call, index) for call in calls for index in range(len(outputs[call]))]
            told = [self._interacts(_moves(self._divergence, self._spots, move)) for move in (_mixed, _noisy)]
            if told != [None, None]:
                return any(told)
        return None

    def mixes_entries(self, other: Any) -> bool | None:
        """Whether a sample's part in the loss depends on others by more than a factor; None: it could not be told.

        To be asked after `mixes_rows`, whose outputs are held.

        Args:
            other: The batch, but for what it holds of the second part's samples beside the model's outputs.
        """
        outputs = self._divergence.whole.outputs
        held: Moves = {(call, index): outputs[call][index] for call, index in self._spots}
        halves = [{**held, **moves} for moves in _halves(self._divergence, self._spots)]
        movers = [Mover(moves) for moves in (*halves, held, *halves)]
        try:
            one, two = (self._run(mover, None) for mover in movers[:2])
            away, one_away, two_away = (self._run(mover, other) for mover in movers[2:])
        except (Exception, SystemExit):
            return None
        if any(mover.missed for mover in movers):
            return None
        share, rounding = _LEVELS.get(self._dtype, _HALF_LEVEL)
        for name, still in self._still.items():
            changes = one[name] - still, two[name] - still, one_away[name] - away[name], two_away[name] - away[name]
            if not all(map(math.isfinite, changes)):
                return None
            slack = rounding * max(map(abs, (still, one[name], two[name], away[name], one_away[name], two_away[name])))
            across = changes[0] * changes[3], changes[1] * changes[2]
            allowed = share * max(map(abs, across)) + 10 * slack * sum(map(abs, changes))
            if abs(across[0] - across[1]) > allowed:
                return True
        return False

    def _interacts(self, moves: list[Moves]) -> bool | None:
        """Whether two moves together change a term by another amount than both alone; None where one has no effect."""
        if not moves[0]:
            return None
        still, dtype = self._still, self._dtype
        try:
            one = self._run(Mover(moves[0]), None)
            if not any(_changes(one[name], still[name], dtype) for name in still):
                return None
            other, both = self._run(Mover(moves[1]), None), self._run(Mover(moves[2]), None)
        except (Exception, SystemExit):  # Outside of the range that the loss takes.
            return None
        seen = [name for name in still if all(_changes(moved[name], still[name], dtype) for moved in (one, other))]
        seen = [name for name in seen if math.isfinite(both[name])]
        if not seen:
            return None
        share, rounding = _LEVELS.get(dtype, _HALF_LEVEL)
        return any(
            abs(both[name] - one[name] - other[name] + still[name])
            > share * max(abs(one[name] - still[name]), abs(other[name] - still[name]))
            + rounding * max(abs(moved[name]) for moved in (still, one, other, both))
            for name in seen
        )


def _changes(moved: float, still: float, dtype: torch.dtype) -> bool:
    rounding = _LEVELS.get(dtype, _HALF_LEVEL)[1]
    return math.isfinite(moved) and math.isfinite(still) and abs(moved - still) > 10 * rounding * abs(still)


def _moves(divergence: Divergence, spots: list[tuple[Call, int]], move: _Move) -> list[Moves]:
    """What each tensor is to be where the first part's rows, the second's, or both are moved."""
    moves: list[Moves] = [{}, {}, {}]
    for order, (call, index) in enumerate(spots):
        rows = divergence.rows(call, index)
        if rows is None:
            continue
        whole, first, second = rows
        moved = move(whole, first.dim, order)
        for which, parts in enumerate(((first,), (second,), (first, second))):
            places = [part.positions for part in parts if part.positions is not None]
            moves[which][call, index] = _exchanged(whole, moved, first.dim, torch.cat(places))
    return moves


def _halves(divergence: Divergence, spots: list[tuple[Call, int]]) -> tuple[Moves, Moves]:
    """What each tensor is to be where one half of the first part's rows is moved, and where the other is."""
    halves: tuple[Moves, Moves] = {}, {}
    for order, (call, index) in enumerate(spots):
        rows = divergence.rows(call, index)
        if rows is None or rows[1].positions is None:
            continue
        whole, first, _ = rows
        for half, places in zip(halves, rows[1].positions.tensor_split(2), strict=True):
            half[call, index] = _exchanged(whole, _mixed(whole, first.dim, order), first.dim, places)
    return halves


def _exchanged(whole: Tensor, moved: Tensor, dim: int, places: Tensor) -> Tensor:
    return whole.index_copy(dim, places, moved.index_select(dim, places))


def _mixed(whole: Tensor, dim: int, seed: int) -> Tensor:
    """Between each row and the one before it: what is a probability, or within other bounds, stays so."""
    share = torch.rand(whole.shape, generator=torch.Generator().manual_seed(seed)) * 0.6 + 0.3
    moved = whole + share.to(whole) * (whole.roll(1, dim) - whole)
    return torch.where(moved.isfinite(), moved, whole)


def _noisy(whole: Tensor, dim: int, seed: int) -> Tensor:
    """Beside it by two standard deviations: far enough for another choice of the hardest samples."""
    noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed))
    finite = whole[whole.isfinite()]
    scale = float(finite.std()) if finite.numel() > 1 else 0.0
    return whole + 2.0 * (scale or 1.0) * noise.to(whole)
