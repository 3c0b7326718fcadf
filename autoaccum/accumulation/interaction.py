"""Does a loss mix samples? Some rows of the model's outputs are moved, others, and both: a sum has no interaction."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoaccum.accumulation.calls import Call, exchange, floating, standing_in
from autoaccum.accumulation.divergence import Divergence

Moves: TypeAlias = "dict[tuple[Call, int], Tensor]"
Terms: TypeAlias = "Mapping[str, float]"
_Move: TypeAlias = "Callable[[Tensor, int, int], Tensor]"

_DEPTHS = 3
_LEVELS = {torch.float64: (1e-6, 1e-13), torch.float32: (2e-3, 1e-6)}
_HALF_LEVEL = (1e-1, 2e-2)
"""What counts as an interaction: a share of the largest change, and rounding, a share of the loss."""


class Mover:
    """Follows a run and has the calls of one depth give what is in `moves`, in place of what they computed."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    def entered(self, call: Call, arguments: Any) -> Any:
        """Nothing is changed here."""
        return arguments

    def left(self, call: Call, output: Any) -> Any:
        """Exchange the tensors that are in `moves`."""
        indices = iter(range(len(floating(output))))

        def move(tensor: Tensor) -> Tensor:
            moved = self._moves.get((call, next(indices)))
            return tensor if moved is None or moved.shape != tensor.shape else standing_in(moved)

        return exchange(output, move)


def mixes_rows(
    run: Callable[[Mover], Terms], still: Terms, divergence: Divergence, coupled: Collection[str], dtype: torch.dtype
) -> bool | None:
    """Whether the loss mixes the rows of the model's outputs; None: that could not be told.

    What the outermost calls return is moved. Where that does not change the loss, as where the model itself computes
    it, what the calls within those return is moved. A term that a model keeps as an attribute is not seen.

    Args:
        run: Gives the terms of the loss of the whole batch, followed by a `Mover`, draws held alike.
        still: Those terms where nothing is moved.
        divergence: What tells where rows lie.
        coupled: Modules known to couple samples: below them, it is not the loss that would be seen.
        dtype: Of the loss.
    """
    for depth in range(_DEPTHS):
        calls = [call for call in divergence.whole.outputs if call.depth == depth]
        if any(outer.name in coupled for call in calls for outer in call.callers):
            return None
        spots = [(call, index) for call in calls for index in range(len(divergence.whole.outputs[call]))]
        told = [_interacts(run, still, _moves(divergence, spots, move), dtype) for move in (_mixed, _noisy)]
        if told != [None, None]:
            return any(told)
    return None


def _interacts(run: Callable[[Mover], Terms], still: Terms, moves: list[Moves], dtype: torch.dtype) -> bool | None:
    """Whether two moves together change a term by another amount than both alone; None where one changes nothing."""
    if not moves[0]:
        return None
    try:
        one = run(Mover(moves[0]))
        if not any(_changes(one[name], still[name], dtype) for name in still):
            return None
        other, both = run(Mover(moves[1])), run(Mover(moves[2]))
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
            tensor = whole.clone()
            for part in parts:
                assert part.positions is not None
                tensor.index_copy_(part.dim, part.positions, moved.index_select(part.dim, part.positions))
            moves[which][call, index] = tensor
    return moves


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
