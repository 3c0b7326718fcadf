"""Compare two updates: how much they differ, where, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autoaccum.verification.update_run import UpdateResult
from autoaccum.verification.verification_result import Difference, Quantity

_FLOOR = 1e-3
"""The least scale of a buffer, relative to its module's largest (at least 1): a mean that is 0 is all rounding."""


@dataclass(frozen=True)
class _Gap:
    """The difference of one tensor or term: its relative error, and the error that rounding explains."""

    where: str
    error: float
    tolerance: float

    @property
    def severity(self) -> tuple[float, float]:
        beyond = math.inf if self.error > 0 else 0.0
        return (self.error / self.tolerance if self.tolerance > 0 else beyond), self.error


def compare(full: UpdateResult, other: UpdateResult, tolerance: float) -> tuple[Difference, ...]:
    """Compare loss, gradients and buffers of two runs of one batch; scales are those of the first.

    Errors are relative: of loss terms to the largest term, of gradients to the largest entry of the whole model, of a
    floating buffer to its own largest entry (or a thousandth of its module's). Integers and booleans must be equal. NaN
    and infinity are equal where both runs have them. A missing gradient counts as zeros. What only one run has, or has
    in another shape, is infinitely far off. A user's loop has no loss to compare.
    """
    gaps: dict[Quantity, Iterator[_Gap]] = {
        "loss": _losses(full.terms, other.terms, tolerance),
        "gradients": _gradients(full.gradients, other.gradients, tolerance),
        "buffers": _buffers(full.buffers, other.buffers, tolerance),
    }
    return tuple(_worst(quantity, list(of_quantity), tolerance) for quantity, of_quantity in gaps.items())


def largest_entry(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite absolute entry of all tensors; 0 where there is none."""
    return max(map(_largest, tensors), default=0.0)


def distance(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite where shapes differ or one is not finite."""
    if left.shape != right.shape:
        return math.inf
    entries, others = _entries(left), _entries(right).to(left.device)
    apart = (entries - others).abs()
    if not apart.numel():
        return 0.0
    if not math.isfinite(apart.max().item()):
        same = (entries == others) | (entries.isnan() & others.isnan())
        apart = apart.masked_fill(~apart.isfinite(), math.inf).masked_fill(same, 0.0)
    return apart.max().item()


def _worst(quantity: Quantity, gaps: list[_Gap], tolerance: float) -> Difference:
    worst = max(gaps, key=lambda gap: gap.severity, default=_Gap("", 0.0, tolerance))
    first = next((gap.where for gap in gaps if gap.error > gap.tolerance), None)
    return Difference(
        quantity=quantity,
        compared=len(gaps),
        error=worst.error,
        where=worst.where or None,
        first=first,
        tolerance=worst.tolerance,
        equal=first is None,
    )


def _losses(full: Mapping[str, float], other: Mapping[str, float], tolerance: float) -> Iterator[_Gap]:
    lefts, rights = (
        {name: torch.tensor(term, dtype=torch.float64) for name, term in run.items()} for run in (full, other)
    )
    scale = largest_entry([*lefts.values(), *rights.values()]) or 1.0
    for name in {**lefts, **rights} if rights else ():
        yield _Gap(name, _relative_error(lefts.get(name), rights.get(name), scale), tolerance)


def _gradients(full: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> Iterator[_Gap]:
    scale = largest_entry(full.values()) or largest_entry(other.values()) or 1.0
    for name in {**full, **other}:
        left = full[name] if name in full else torch.zeros_like(other[name])
        yield _Gap(name, _relative_error(left, other.get(name, torch.zeros_like(left)), scale), tolerance)


def _buffers(full: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> Iterator[_Gap]:
    floors: dict[str, float] = {}
    for name, buffer in full.items():
        if _is_rounded(buffer):
            module = name.rpartition(".")[0]
            floors[module] = max(floors.get(module, _FLOOR), _FLOOR * _largest(buffer))
    for name in {**full, **other}:
        left, right = full.get(name), other.get(name)
        rounded = any(buffer is not None and _is_rounded(buffer) for buffer in (left, right))
        floor = floors.get(name.rpartition(".")[0], _FLOOR) if rounded else 0.0
        scale = max(0.0 if left is None else _largest(left), floor) or 1.0
        yield _Gap(name, _relative_error(left, right, scale), tolerance if rounded else 0.0)


def _relative_error(left: Tensor | None, right: Tensor | None, scale: float) -> float:
    return math.inf if left is None or right is None else distance(left, right) / scale


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(tensor: Tensor) -> float:
    entries = _entries(tensor).abs()
    if entries.numel() and math.isfinite(largest := entries.max().item()):
        return largest
    entries = entries[entries.isfinite()]
    return entries.max().item() if entries.numel() else 0.0


def _entries(tensor: Tensor) -> Tensor:
    """Return the entries flat and dense in float64, or complex128."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).reshape(-1)


def is_finite(gradient: Tensor) -> bool:
    """Return whether all entries are finite."""
    return bool(_entries(gradient).isfinite().all())
