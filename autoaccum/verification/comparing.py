"""Two updates side by side: how far apart, where, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoaccum.verification.records import Difference, Quantity
from autoaccum.verification.updates import Outcome

_FLOOR = 1e-3
"""Of a buffer's scale, in units of its module's largest (at least one): a mean that is truly zero is all rounding."""


@dataclass(frozen=True)
class Tolerances:
    """How far apart two runs of one batch may be and count as the same.

    Attributes:
        relative: Of loss terms, gradients and floating buffers, relative to their scale.
        update: How far each entry of a parameter may be off after the update, by name; those that are not named are
            held to `relative` of the scale.
        largest_move: How far the full batch's update moves a parameter at most, which is the scale of errors of an
            update; None: the largest parameter is.
        rounding: Where they come from, as a sentence.
    """

    relative: float
    update: Mapping[str, Tensor] = field(default_factory=dict)
    largest_move: float | None = None
    rounding: str = ""


@dataclass(frozen=True)
class _Gap:
    """How far one tensor or term is off: relative error, its scale, and the error that rounding explains."""

    where: str
    error: float
    scale: float
    tolerance: float

    @property
    def severity(self) -> tuple[float, float]:
        beyond = math.inf if self.error > 0 else 0.0
        return (self.error / self.tolerance if self.tolerance > 0 else beyond), self.error


def compare(full: Outcome, other: Outcome, tolerances: Tolerances) -> tuple[Difference, ...]:
    """Loss, gradients, buffers and update of two runs of one batch.

    Errors are relative: of loss terms to the largest term, of gradients to the largest entry of the full batch's over
    the whole model, of a floating buffer to its own largest entry (or a thousandth of its module's), of parameters
    after the update to how far the full batch's moves one at most. Whole numbers and truth values must be the same.
    NaN and infinities are equal where both have them. A gradient that is None is one of zeros: an optimizer that treats
    the two differently (one with weight decay passes over None) shows it in the update. What only one of the two has,
    or has in another shape, is infinitely far off; a loop that tells no loss has none to compare.

    Args:
        full: Of the full batch, which scales are taken of.
        other: What is held against it.
        tolerances: What rounding explains.
    """
    loss = _compared("loss", _losses(full.terms, other.terms, tolerances.relative), tolerances.relative)
    gradients = _compared("gradients", _gradients(full, other, tolerances.relative), tolerances.relative)
    buffers = _compared("buffers", _buffers(full, other, tolerances.relative), tolerances.relative)
    update = _compared("update", _update(full, other, tolerances), tolerances.relative)
    return loss, gradients, buffers, update


def _compared(quantity: Quantity, gaps: Iterable[_Gap], tolerance: float) -> Difference:
    found = list(gaps)
    worst = max(found, key=lambda gap: gap.severity, default=_Gap("", 0.0, 1.0, tolerance))
    return Difference(
        quantity=quantity,
        compared=len(found),
        error=worst.error,
        scale=worst.scale,
        where=worst.where or None,
        tolerance=worst.tolerance,
        equal=all(gap.error <= gap.tolerance for gap in found),
    )


def _losses(full: Mapping[str, float], other: Mapping[str, float], tolerance: float) -> Iterable[_Gap]:
    scale = _scale(abs(term) for terms in (full, other) for term in terms.values())
    for name in _names(full, other) if other else ():
        one, two = full.get(name), other.get(name)
        error = math.inf
        if one is not None and two is not None:
            error = distance(torch.tensor(one, dtype=torch.float64), torch.tensor(two, dtype=torch.float64)) / scale
        yield _Gap(name, error, scale, tolerance)


def _gradients(full: Outcome, other: Outcome, tolerance: float) -> Iterable[_Gap]:
    scale = largest_entry(full.gradients.values()) or _scale(map(_largest, _tensors(other.gradients.values())))
    for name in _names(full.gradients, other.gradients):
        one, two = full.gradients.get(name), other.gradients.get(name)
        if one is None and two is None:
            continue
        one, two = one if one is not None else _zeros_like(two), two if two is not None else _zeros_like(one)
        yield _Gap(name, distance(one, two) / scale, scale, tolerance)


def _buffers(full: Outcome, other: Outcome, tolerance: float) -> Iterable[_Gap]:
    floors = _floors(full.buffers)
    for name in _names(full.buffers, other.buffers):
        one, two = full.buffers.get(name), other.buffers.get(name)
        rounded = any(buffer is not None and _is_rounded(buffer) for buffer in (one, two))
        scale = max(0.0 if one is None else _largest(one), floors.get(_module(name), _FLOOR) if rounded else 0.0) or 1.0
        error = math.inf if one is None or two is None else distance(one, two) / scale
        yield _Gap(name, error, scale, tolerance if rounded else 0.0)


def _update(full: Outcome, other: Outcome, tolerances: Tolerances) -> Iterable[_Gap]:
    scale = tolerances.largest_move or _scale(map(_largest, full.parameters.values()))
    for name in _names(full.parameters, other.parameters):
        one, two = full.parameters.get(name), other.parameters.get(name)
        if one is None or two is None or one.shape != two.shape:
            yield _Gap(name, math.inf, scale, tolerances.relative)
        else:
            yield _worst_entry(name, one, two, tolerances.update.get(name), scale, tolerances.relative)


def _worst_entry(name: str, one: Tensor, two: Tensor, allowed: Tensor | None, scale: float, tolerance: float) -> _Gap:
    """The entry of a parameter that is farthest beyond what it is allowed to be off."""
    apart = _apart(one, two)
    if not apart.numel():
        return _Gap(name, 0.0, scale, tolerance)
    bound = torch.full_like(apart, tolerance * scale) if allowed is None else allowed.to(apart).reshape(-1)
    limits = torch.finfo(apart.dtype)
    bound = bound.nan_to_num(0.0).clamp(limits.tiny, limits.max)
    index = int((apart / bound).argmax())
    return _Gap(name, apart[index].item() / scale, scale, bound[index].item() / scale)


def largest_entry(tensors: Iterable[Tensor | None]) -> float:
    """The largest finite absolute entry of all; 0 where there is none."""
    return max(map(_largest, _tensors(tensors)), default=0.0)


def _names(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Those of both, once each, in order."""
    return list(dict.fromkeys([*one, *two]))


def _tensors(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _scale(sizes: Iterable[float]) -> float:
    """The largest finite size; 1 where all is zero, so that it can be divided by."""
    return max((size for size in sizes if math.isfinite(size)), default=0.0) or 1.0


def _floors(buffers: Mapping[str, Tensor]) -> dict[str, float]:
    """By module: what a buffer's scale is not below."""
    floors: dict[str, float] = {}
    for name, buffer in buffers.items():
        if _is_rounded(buffer):
            module = _module(name)
            floors[module] = max(floors.get(module, _FLOOR), _FLOOR * _largest(buffer))
    return floors


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _zeros_like(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return torch.zeros_like(tensor)


def _largest(tensor: Tensor) -> float:
    entries = _entries(tensor).abs()
    entries = entries[entries.isfinite()]
    return entries.max().item() if entries.numel() else 0.0


def distance(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference of two tensors' entries; infinite where they are not of one shape or finite."""
    if one.shape != two.shape:
        return math.inf
    apart = _apart(one, two)
    return apart.max().item() if apart.numel() else 0.0


def _apart(one: Tensor, two: Tensor) -> Tensor:
    """The absolute difference of each entry, flat, in float64."""
    left, right = _entries(one), _entries(two).to(one.device)
    apart = (left - right).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    return apart.masked_fill(~apart.isfinite(), math.inf).masked_fill(same, 0.0)


def _entries(tensor: Tensor) -> Tensor:
    """Flat, dense, in float64 (complex128 of what is complex)."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64).reshape(-1)
