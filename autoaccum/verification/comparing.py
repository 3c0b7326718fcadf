"""Two updates side by side: how far apart, where, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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
        update: How far each entry of a parameter may be off after the update, by name; others have `relative`.
        largest_move: How far the full batch's update moves a parameter at most: the scale of an update's errors. None:
            the largest parameter is.
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
    """Loss, gradients, buffers and update of two runs of one batch; scales are taken of the first.

    Errors are relative: of loss terms to the largest term, of gradients to the largest entry over the whole model, of a
    floating buffer to its own largest entry (or a thousandth of its module's), of parameters after the update to the
    largest move. Whole numbers and truth values must be the same. NaN and infinities are equal where both have them. A
    gradient that is None is one of zeros. What only one of the two has, or has in another shape, is infinitely far off;
    a loop that tells no loss has none to compare.
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
    """The largest finite absolute entry of all; 0 where there is none."""
    return max((_largest(tensor) for tensor in tensors if tensor is not None), default=0.0)


def distance(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference of two tensors' entries; infinite where they are not of one shape or finite."""
    if one.shape != two.shape:
        return math.inf
    apart = _apart(one, two)
    return apart.max().item() if apart.numel() else 0.0


def _worst(quantity: Quantity, gaps: list[_Gap], tolerance: float) -> Difference:
    worst = max(gaps, key=lambda gap: gap.severity, default=_Gap("", 0.0, 1.0, tolerance))
    return Difference(
        quantity=quantity,
        compared=len(gaps),
        error=worst.error,
        scale=worst.scale,
        where=worst.where or None,
        tolerance=worst.tolerance,
        equal=all(gap.error <= gap.tolerance for gap in gaps),
    )


def _losses(full: Mapping[str, float], other: Mapping[str, float], tolerance: float) -> Iterator[_Gap]:
    scale = _scale(abs(term) for terms in (full, other) for term in terms.values())
    for name in {**full, **other} if other else ():
        one, two = (torch.tensor(terms.get(name, math.inf), dtype=torch.float64) for terms in (full, other))
        known = name in full and name in other
        yield _Gap(name, distance(one, two) / scale if known else math.inf, scale, tolerance)


def _gradients(
    full: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None], tolerance: float
) -> Iterator[_Gap]:
    scale = largest_entry(full.values()) or largest_entry(other.values()) or 1.0
    for name in {**full, **other}:
        found = [one for one in (full.get(name), other.get(name)) if one is not None]
        if found:
            one, two = found if len(found) == 2 else (found[0], torch.zeros_like(found[0]))
            yield _Gap(name, distance(one, two) / scale, scale, tolerance)


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
        yield _Gap(name, error, scale, tolerance if rounded else 0.0)


def _update(full: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerances: Tolerances) -> Iterator[_Gap]:
    scale = tolerances.largest_move or _scale(map(_largest, full.values()))
    for name in {**full, **other}:
        one, two = full.get(name), other.get(name)
        if one is None or two is None or one.shape != two.shape:
            yield _Gap(name, math.inf, scale, tolerances.relative)
        else:
            yield _worst_entry(name, _apart(one, two), tolerances.update.get(name), scale, tolerances.relative)


def _worst_entry(name: str, apart: Tensor, allowed: Tensor | None, scale: float, tolerance: float) -> _Gap:
    """The entry of a parameter that is farthest beyond what it is allowed to be off."""
    if not apart.numel():
        return _Gap(name, 0.0, scale, tolerance)
    bound = torch.full_like(apart, tolerance * scale) if allowed is None else allowed.to(apart).reshape(-1)
    limits = torch.finfo(apart.dtype)
    bound = bound.nan_to_num(0.0).clamp(limits.tiny, limits.max)
    index = int((apart / bound).argmax())
    return _Gap(name, apart[index].item() / scale, scale, bound[index].item() / scale)


def _scale(sizes: Iterable[float]) -> float:
    """The largest finite size; 1 where all is zero, so that it can be divided by."""
    return max((size for size in sizes if math.isfinite(size)), default=0.0) or 1.0


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(tensor: Tensor) -> float:
    entries = _entries(tensor).abs()
    entries = entries[entries.isfinite()]
    return entries.max().item() if entries.numel() else 0.0


def _apart(one: Tensor, two: Tensor) -> Tensor:
    """The absolute difference of each entry, flat, in float64."""
    left, right = _entries(one), _entries(two).to(one.device)
    apart = (left - right).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    return apart.masked_fill(~apart.isfinite(), math.inf).masked_fill(same, 0.0)


def _entries(tensor: Tensor) -> Tensor:
    """Flat, dense, in float64 (complex128 of what is complex)."""
    return exact(tensor.to_dense() if tensor.layout != torch.strided else tensor).reshape(-1)


def exact(tensor: Tensor) -> Tensor:
    """A tensor in float64, or complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_finite(gradient: Tensor | None) -> bool:
    """Whether all entries are finite; so it is where there is no gradient."""
    return gradient is None or bool(_entries(gradient).isfinite().all())
