"""Does a part's tensor hold the rows that its samples have in the whole batch's?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autoaccum.accumulation.rows import find_layouts

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 5e-2
"""Relative to a tensor's usual entry. In a batch of a few samples, what company changes it changes by its own size."""

_MOST_ROWS = 512
_MOST_ENTRIES = 2**20
"""Where rows are in another order, each is looked for among all: that costs rows times entries."""


@dataclass(frozen=True)
class Match:
    """A tensor of a part, held against the whole's.

    Attributes:
        state: Rows that `agree`, or `differ`; `alike`: no dimension grows with the batch, and the values are equal;
            `square`: several do, as those of a matrix of similarities; `untold`: the shapes say nothing.
        dim: The dimension of the rows, where there is one.
        positions: Where the part's rows lie in the whole, in the part's order.
        right: The whole's values of those rows, where the part's are others.
    """

    state: Literal["alike", "agree", "differ", "square", "untold"]
    dim: int = 0
    positions: Tensor | None = None
    right: Tensor | None = None


def match(
    whole: Tensor,
    part: Tensor,
    index: int,
    sizes: Sequence[int],
    known: Mapping[int, Tensor],
    other: Sequence[int] | None = None,
) -> Match:
    """Hold the tensor of one of two parts against the whole's.

    Rows may lie one sample after the other, or time first, or in any other order: a batch that is sorted by length is
    sorted otherwise in company. Where a further dimension is shorter in the part, as where padding is cut to the
    longest of the batch, the whole's is cut too.

    Args:
        whole: Of the run of both parts together.
        part: Of the part's own run.
        index: Which part: 0 or 1.
        sizes: Samples of both.
        known: Positions that are known from what went in, by the whole's number of rows.
        other: The shape in the other part, where that is known: samples are where both add up to the whole, and
            padding is where one is as long as that.
    """
    shape, own = tuple(whole.shape), tuple(part.shape)
    if len(shape) != len(own) or any(few > many for few, many in zip(own, shape, strict=True)):
        return Match("untold")
    if max(part.numel(), 1) == 1 and whole.numel() == 1 or part.numel() == 0:
        return Match("alike")
    growing = [dim for dim in range(len(shape)) if own[dim] < shape[dim]]
    if not growing:
        return Match("alike") if is_close(whole, part) else Match("differ", right=whole)
    adding = growing
    if other is not None and len(other) == len(shape):
        adding = [dim for dim in growing if own[dim] + other[dim] == shape[dim]] or growing
    per_part = [dim for dim in adding if own[dim] * sum(sizes) == shape[dim] * sizes[index]]
    if len(per_part) > 1:
        return _match_square(whole, part, per_part, 0 if index == 0 else 1)
    return _match_rows(whole, part, index, sizes, adding, known, is_cut=len(growing) > len(adding))


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal but for rounding, infinities and NaN included."""
    tolerance = _TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    sizes = one[one.isfinite() & (one != 0)].abs()
    usual = float(sizes.median()) if sizes.numel() else 0.0
    return torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * usual, equal_nan=True)


def _match_square(whole: Tensor, part: Tensor, dims: Sequence[int], start: int) -> Match:
    """Hold it against the part's own block; `alike` where all beside that is one value, as masks leave it."""
    right = whole
    for dim in dims:
        rows, right = right, right.narrow(dim, start * (whole.shape[dim] - part.shape[dim]), part.shape[dim])
    if right.shape != part.shape:
        return Match("square")
    beside = rows.narrow(dims[-1], (1 - start) * part.shape[dims[-1]], whole.shape[dims[-1]] - part.shape[dims[-1]])
    is_blank = bool((beside == beside.flatten()[:1]).all())
    return Match("alike") if is_blank and is_close(right, part) else Match("square", right=right)


def _match_rows(
    whole: Tensor,
    part: Tensor,
    index: int,
    sizes: Sequence[int],
    growing: list[int],
    known: Mapping[int, Tensor],
    *,
    is_cut: bool,
) -> Match:
    first: Match | None = None
    for dim in growing:
        cut = _cut_beside(whole, part, dim)
        for positions in _candidates(cut, part, dim, index, sizes, known):
            rows = cut.index_select(dim, positions)
            if is_close(rows, part):
                return Match("agree", dim, positions)
            first = first or Match("differ", dim, positions, rows)
    for dim in growing:
        positions_found = _look_for_rows(_cut_beside(whole, part, dim), part, dim)
        if positions_found is not None:
            return Match("agree", dim, positions_found)
    return first if first is not None and len(growing) == 1 and not is_cut else Match("untold")


def _cut_beside(whole: Tensor, part: Tensor, dim: int) -> Tensor:
    for other in range(whole.ndim):
        if other != dim:
            whole = whole.narrow(other, 0, part.shape[other])
    return whole


def _candidates(
    whole: Tensor, part: Tensor, dim: int, index: int, sizes: Sequence[int], known: Mapping[int, Tensor]
) -> Iterator[Tensor]:
    """Positions the part's rows may have in the whole, the likeliest first."""
    rows, own = whole.shape[dim], part.shape[dim]
    if rows in known and len(known[rows]) == own:
        yield known[rows]
    lengths = (own, rows - own) if index == 0 else (rows - own, own)
    shapes = [(*whole.shape[:dim], length, *whole.shape[dim + 1 :]) for length in lengths]
    every = torch.arange(rows, device=whole.device)
    for layout in find_layouts(whole.shape, shapes, sizes):
        lone = type(layout)(0, layout.outer)
        yield lone.cut(every, lengths)[index]


def _look_for_rows(whole: Tensor, part: Tensor, dim: int) -> Tensor | None:
    """Where each row of the part lies in the whole, whatever the order; None where one is not found."""
    if whole.shape[dim] > _MOST_ROWS or whole.numel() > _MOST_ENTRIES:
        return None
    all_rows, rows = (tensor.movedim(dim, 0).flatten(1).nan_to_num(0.0, 0.0, 0.0) for tensor in (whole, part))
    distances = torch.cdist(rows.double(), all_rows.double(), compute_mode="donot_use_mm_for_euclid_dist")
    positions = []
    for row in range(rows.shape[0]):
        nearest = int(distances[row].argmin())
        positions.append(nearest)
        distances[:, nearest] = torch.inf
    found = torch.tensor(positions, device=whole.device)
    return found if is_close(whole.index_select(dim, found), part) else None
