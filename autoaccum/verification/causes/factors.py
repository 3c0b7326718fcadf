"""What each part counts for in a gradient: least squares over the gradients of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_ENTRIES = 2**18
_LEAST_DISTINCT = 1e-5
"""Of a part's gradient, what no combination of the others gives: less, and rounding decides the factors."""


@dataclass(frozen=True)
class Factors:
    """The combination of parts that comes nearest to a gradient.

    Attributes:
        values: What each part is multiplied by.
        residual: The largest entry that the combination lacks, relative to the largest of the gradient.
    """

    values: tuple[float, ...]
    residual: float


def flatten(gradients: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> Tensor:
    """The gradients of the parameters `like`, in order, in one row, in float64 on the CPU; None counts as zeros.

    Of more than a quarter of a million entries every n-th is taken: what the parts count for shows in any of them.
    """
    stride = max(1, -(-sum(parameter.numel() for parameter in like.values()) // _MOST_ENTRIES))
    rows = [torch.zeros(0, dtype=torch.float64)]
    for name, parameter in like.items():
        found = gradients.get(name)
        gradient = torch.zeros_like(parameter) if found is None else found
        dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
        rows.append(dense.reshape(-1)[::stride].to("cpu", torch.float64))
    return torch.cat(rows)


def find_factors(target: Tensor, parts: Sequence[Tensor]) -> Factors | None:
    """The factors of `parts` that add up to `target`; None where the parts do not determine them.

    >>> one, two = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([0.0, 1.0, 1.0]).double()
    >>> [round(factor, 9) for factor in find_factors(0.75 * one + 0.25 * two, [one, two]).values]
    [0.75, 0.25]
    >>> find_factors(one, [two, two]) is None
    True
    """
    if not target.numel() or not all(bool(row.isfinite().all()) for row in (target, *parts)):
        return None
    columns = torch.stack(list(parts), dim=1)
    norms = columns.norm(dim=0)
    if columns.shape[0] <= columns.shape[1] or not bool((norms > 0).all()):
        return None
    orthogonal, triangle = torch.linalg.qr(columns / norms)
    if float(triangle.diagonal().abs().min()) < _LEAST_DISTINCT:
        return None
    scaled = torch.linalg.solve_triangular(triangle, (orthogonal.T @ target)[:, None], upper=True)[:, 0]
    values = tuple((scaled / norms).tolist())
    return Factors(values, find_residual(target, parts, values))


def find_residual(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> float:
    """The largest entry that `parts` times `factors` are off, relative to the largest of `target`; parts at 0 are out.

    Infinite where it is no number.
    """
    left = target.clone()
    for row, factor in zip(parts, factors, strict=True):
        if factor != 0:
            left -= factor * row
    scale = max(float(target.abs().max()) if target.numel() else 0.0, 1e-300)
    error = float(left.abs().max()) / scale if left.numel() else 0.0
    return error if error == error else float("inf")
