"""Compare two updates: how much they differ, where, and whether rounding explains it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autoaccum.verification.update_run import UpdateResult
from autoaccum.verification.verification_result import Difference, Quantity

if TYPE_CHECKING:
    from autoaccum.verification.paired_runs import PairedRuns

_FLOOR = 1e-3
"""The least scale of a buffer, relative to its module's largest (at least 1): a mean that is 0 is all rounding."""


@dataclass(frozen=True)
class Tolerances:
    """The largest differences with which two runs of one batch count as equal.

    Attributes:
        relative: For loss terms, gradients and floating buffers, relative to their scale.
        update: What the optimizer makes of rounding in each entry of a parameter, by name.
        largest_move: The most that the full batch's update changes a parameter: the scale of errors of the update.
            None: the largest parameter is the scale.
        rounding: Where the tolerances come from, as a sentence.
    """

    relative: float
    update: Mapping[str, Tensor] = field(default_factory=dict)
    largest_move: float | None = None
    rounding: str = ""


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


def compare(full: UpdateResult, other: UpdateResult, tolerances: Tolerances) -> tuple[Difference, ...]:
    """Compare loss, gradients, buffers and parameters of two runs of one batch; scales are those of the first.

    Errors are relative: of loss terms to the largest term, of gradients to the largest entry of the whole model, of a
    floating buffer to its own largest entry (or a thousandth of its module's), of parameters after the update to the
    largest move. Integers and booleans must be equal. NaN and infinity are equal where both runs have them. A gradient
    of None counts as zeros. What only one run has, or has in another shape, is infinitely far off. A user's loop has no
    loss to compare.
    """
    relative = tolerances.relative
    gaps: dict[Quantity, Iterator[_Gap]] = {
        "loss": _losses(full.terms, other.terms, relative),
        "gradients": _gradients(full.gradients, other.gradients, relative),
        "buffers": _buffers(full.buffers, other.buffers, relative),
        "update": _update(full.parameters, other.parameters, tolerances),
    }
    return tuple(_worst(quantity, list(found), relative) for quantity, found in gaps.items())


def largest_entry(tensors: Iterable[Tensor | None]) -> float:
    """Return the largest finite absolute entry of all tensors; 0 where there is none."""
    return max((_largest(tensor) for tensor in tensors if tensor is not None), default=0.0)


def distance(one: Tensor, two: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite where shapes differ or one is not finite."""
    if one.shape != two.shape:
        return math.inf
    apart = _apart(one, two)
    return apart.max().item() if apart.numel() else 0.0


def _worst(quantity: Quantity, gaps: list[_Gap], tolerance: float) -> Difference:
    worst = max(gaps, key=lambda gap: gap.severity, default=_Gap("", 0.0, tolerance))
    return Difference(
        quantity=quantity,
        compared=len(gaps),
        error=worst.error,
        where=worst.where or None,
        first=next((gap.where for gap in gaps if gap.error > gap.tolerance), None),
        tolerance=worst.tolerance,
        equal=all(gap.error <= gap.tolerance for gap in gaps),
    )


def _losses(full: Mapping[str, float], other: Mapping[str, float], tolerance: float) -> Iterator[_Gap]:
    scale = _scale(abs(term) for terms in (full, other) for term in terms.values())
    for name in {**full, **other} if other else ():
        one, two = (torch.tensor(terms.get(name, math.inf), dtype=torch.float64) for terms in (full, other))
        known = name in full and name in other
        yield _Gap(name, distance(one, two) / scale if known else math.inf, tolerance)


def _gradients(
    full: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None], tolerance: float
) -> Iterator[_Gap]:
    scale = largest_entry(full.values()) or largest_entry(other.values()) or 1.0
    for name in {**full, **other}:
        found = [one for one in (full.get(name), other.get(name)) if one is not None]
        if found:
            one, two = found if len(found) == 2 else (found[0], torch.zeros_like(found[0]))
            yield _Gap(name, distance(one, two) / scale, tolerance)


def _buffers(full: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float) -> Iterator[_Gap]:
    floors: dict[str, float] = {}
    for name, buffer in full.items():
        if _is_rounded(buffer):
            module = name.rpartition(".")[0]
            floors[module] = max(floors.get(module, _FLOOR), _FLOOR * _largest(buffer))
    for name in {**full, **other}:
        one, two = full.get(name), other.get(name)
        rounded = any(buffer is not None and _is_rounded(buffer) for buffer in (one, two))
        floor = floors.get(name.rpartition(".")[0], _FLOOR) if rounded else 0.0
        scale = max(largest_entry([one]), floor) or 1.0
        error = math.inf if one is None or two is None else distance(one, two) / scale
        yield _Gap(name, error, tolerance if rounded else 0.0)


def _update(full: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerances: Tolerances) -> Iterator[_Gap]:
    scale = tolerances.largest_move or _scale(map(_largest, full.values()))
    for name in {**full, **other}:
        one, two = full.get(name), other.get(name)
        if one is None or two is None or one.shape != two.shape:
            yield _Gap(name, math.inf, tolerances.relative)
        else:
            yield _worst_entry(name, _apart(one, two), tolerances.update.get(name), scale, tolerances.relative)


def _worst_entry(name: str, apart: Tensor, allowed: Tensor | None, scale: float, tolerance: float) -> _Gap:
    """Return the entry of a parameter with the largest error relative to its tolerance."""
    if not apart.numel():
        return _Gap(name, 0.0, tolerance)
    bound = torch.full_like(apart, tolerance * scale) if allowed is None else allowed.to(apart).reshape(-1)
    limits = torch.finfo(apart.dtype)
    bound = bound.nan_to_num(0.0).clamp(limits.tiny, limits.max)
    index = int((apart / bound).argmax())
    return _Gap(name, apart[index].item() / scale, bound[index].item() / scale)


def _scale(sizes: Iterable[float]) -> float:
    """Return the largest finite size; 1 where all are zero, so that it can be divided by."""
    return max((size for size in sizes if math.isfinite(size)), default=0.0) or 1.0


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(tensor: Tensor) -> float:
    entries = _entries(tensor).abs()
    if entries.numel() and math.isfinite(largest := entries.max().item()):
        return largest
    entries = entries[entries.isfinite()]
    return entries.max().item() if entries.numel() else 0.0


def _apart(one: Tensor, two: Tensor) -> Tensor:
    """Return the absolute difference of each entry, flat, in float64."""
    left, right = _entries(one), _entries(two).to(one.device)
    apart = (left - right).abs()
    if not apart.numel() or math.isfinite(apart.max().item()):
        return apart
    same = (left == right) | (left.isnan() & right.isnan())
    return apart.masked_fill(~apart.isfinite(), math.inf).masked_fill(same, 0.0)


def _entries(tensor: Tensor) -> Tensor:
    """Return the entries flat and dense in float64, or complex128."""
    return exact(tensor.to_dense() if tensor.layout != torch.strided else tensor).reshape(-1)


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_finite(gradient: Tensor | None) -> bool:
    """Return whether all entries are finite; True where there is no gradient."""
    return gradient is None or bool(_entries(gradient).isfinite().all())


_TOLERANCE, _NARROW_TOLERANCE, _CARD_TOLERANCE, _HALF_TOLERANCE = 1e-10, 1e-4, 5e-3, 5e-2
"""Tolerances in float64; in float32; on a card, which may round products to 10 bits (TF32); of a model in bf16 or fp16.
A mistake is larger than these."""

_MARGIN = 4


def find_tolerances(precision: str, parameters: Iterable[Tensor]) -> Tolerances:
    """Return how much the runs of a batch may differ by rounding alone, with these parameters of the model."""
    if precision == "fp64":
        words = "1e-10 of the largest entry, in float64; for the update also what the optimizer makes of rounding"
        return Tolerances(relative=_TOLERANCE, rounding=words)
    floating = [parameter for parameter in parameters if parameter.is_floating_point()]
    relative = _CARD_TOLERANCE if any(parameter.is_cuda for parameter in floating) else _NARROW_TOLERANCE
    if any(parameter.element_size() < torch.float32.itemsize for parameter in floating):
        relative = _HALF_TOLERANCE
    words = f"an error below {relative:.0e} of the largest gradient entry goes unnoticed, --precision fp64 shows it"
    return Tolerances(relative=relative, rounding=words)


def with_move(tolerances: Tolerances, runs: PairedRuns) -> Tolerances:
    """Return `tolerances` with the largest move of a parameter in the update of `runs` as its scale."""
    initial = runs.initial()
    moves = (exact(after) - exact(initial[name]) for name, after in runs.full().parameters.items())
    return dataclasses.replace(tolerances, largest_move=largest_entry(moves))


def with_optimizer_spread(tolerances: Tolerances, runs: PairedRuns, other: UpdateResult) -> Tolerances:
    """Return `tolerances` widened by what the full batch's optimizer makes of the other run's gradients.

    For gradients that are equal to rounding. An optimizer that divides by the gradient's size (Adam) or takes its sign
    moves by its whole learning rate where a gradient is zero, and the order of a sum decides in which direction; one
    that orthogonalises gradients (Muon) amplifies rounding. Where only one of the two runs has a gradient, the
    tolerance stays.
    """
    full = runs.full().gradients
    given = {
        name: gradient if gradient is None or other.gradients.get(name) is None else other.gradients[name]
        for name, gradient in full.items()
    }
    floor = tolerances.relative * (tolerances.largest_move or 0.0)
    before, after = runs.update_from(full), runs.update_from(given)
    update = {
        name: _MARGIN * ((exact(after[name]) - exact(parameter)).abs() + _roundoff(parameter)) + floor
        for name, parameter in before.items()
    }
    return dataclasses.replace(tolerances, update=update)


def _roundoff(parameter: Tensor) -> Tensor:
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return torch.zeros_like(parameter, dtype=torch.float64)
    return exact(parameter).abs() * torch.finfo(parameter.dtype).eps
