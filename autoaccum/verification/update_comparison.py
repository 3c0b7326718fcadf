"""Two updates side by side: how far apart, where, and whether rounding explains it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from autoaccum.errors import NotMeasuredError
from autoaccum.verification.update_run import UNCHANGED, Change, Outcome
from autoaccum.verification.verification_result import Difference, Quantity

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


DOUBLE = 1e-10
"""In float64: rounding takes 1e-16 per operation, a fault more than this."""

_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half the distance from 1 to the next number that the dtype of the computation holds."""

_LEAST_ROUNDOFFS = 8
_MARGIN = 4


class _Runs(Protocol):
    """The part of `runs.Runs` that is asked here."""

    def full(self, change: Change = UNCHANGED) -> Outcome: ...

    def update_from(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]: ...

    def initial(self) -> Mapping[str, Tensor]: ...


def find_tolerances(runs: _Runs, *, precision: str, samples: int, double: _Runs | None = None) -> Tolerances:
    """How far rounding alone takes the runs of a batch apart.

    In float64 that is a fixed 1e-10. In another precision it is 4 times the distance between the full batch's loss and
    gradient and those in float64 (with random draws held, since other dtypes draw other numbers), and at least 8 unit
    roundoffs; where there are none in float64 to compare with, 8 unit roundoffs times the root of the samples, as
    errors of sums grow (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019).

    `double` are runs of the same batch in float64; None where that does not run.

    Raises:
        NotMeasuredError: Rounding in that precision is as large as the gradient.
    """
    if precision == "fp64":
        words = f"{DOUBLE:.0e} of the largest entry, in float64; for the update also what the optimizer makes of that"
        return Tolerances(relative=DOUBLE, rounding=words)
    roundoff = _ROUNDOFF[precision]
    least = _LEAST_ROUNDOFFS * roundoff
    if double is None:
        relative = least * math.sqrt(samples)
        words = f"8 unit roundoffs of {precision} times the root of the samples: the workload does not run in float64"
    else:
        distance = _distance(runs.full(Change(calm=True)), double.full(Change(calm=True)))
        if not _MARGIN * distance < 1:
            raise NotMeasuredError(
                f"the full batch's own gradient in {precision} is {distance:.0%} off that in float64: rounding hides"
                " whatever accumulation does",
                hint="verify with --precision fp64",
            )
        relative = max(_MARGIN * distance, least)
        words = f"4 times the distance of the full batch's loss and gradient in {precision} from float64"
    blind = f"an error below {relative:.1e} of the largest gradient entry is not seen, --precision fp64 sees it"
    return Tolerances(relative=relative, rounding=f"{words}; {blind}")


def with_move(tolerances: Tolerances, runs: _Runs) -> Tolerances:
    """`tolerances`, for updates relative to the largest move of a parameter by that of `runs`."""
    initial = runs.initial()
    moves = (exact(after) - exact(initial[name]) for name, after in runs.full().parameters.items())
    return dataclasses.replace(tolerances, update={}, largest_move=largest_entry(moves))


def with_update(tolerances: Tolerances, runs: _Runs) -> Tolerances:
    """`tolerances`, with what each entry of a parameter may be off after the update of `runs`.

    That is the same share of the largest move of a parameter, 4 times how far the update moves when each gradient
    entry is moved by its tolerance, up and down, and a few roundoffs of the parameter. An optimizer that divides by the
    gradient's size (Adam) or takes its sign moves by its whole learning rate where a gradient is truly zero, and one
    sum in another order decides which way.
    """
    tolerances, full = with_move(tolerances, runs), runs.full()
    floor = tolerances.relative * (tolerances.largest_move or 0.0)
    shift = tolerances.relative * largest_entry(full.gradients.values())
    moved: dict[str, Tensor] = {}
    for direction in (1.0, -1.0):
        generator = torch.Generator().manual_seed(0)  # The same signs both times, and none of the user's draws.
        shifted = {name: _shifted(one, direction * shift, generator) for name, one in full.gradients.items()}
        for name, after in runs.update_from(shifted).items():
            by = (exact(after) - exact(full.parameters[name])).abs()
            moved[name] = torch.maximum(moved[name], by) if name in moved else by
    allowed = {name: _MARGIN * (by + _roundoff(full.parameters[name])) + floor for name, by in moved.items()}
    return dataclasses.replace(tolerances, update=allowed)


def allow_optimizer_spread(tolerances: Tolerances, runs: _Runs, other: Outcome) -> Tolerances:
    """`tolerances`, with how far the optimizer takes parameters apart that is given the other run's very gradients.

    To be asked where gradients are equal: an optimizer that orthogonalises them (Muon) makes much of what rounding has
    left, and by no other rule than the full batch's. Where only one of the two has a gradient, it stays as it is.
    """
    full = runs.full()
    given = {
        name: one if one is None or other.gradients.get(name) is None else other.gradients[name]
        for name, one in full.gradients.items()
    }
    before, after = runs.update_from(full.gradients), runs.update_from(given)
    update = dict(tolerances.update)
    for name, one in before.items():
        apart = (exact(after[name]) - exact(one)).abs() + _roundoff(one)
        update[name] = torch.maximum(update[name], apart) if name in update else apart
    return dataclasses.replace(tolerances, update=update)


def _distance(rounded: Outcome, exactly: Outcome) -> float:
    """How far the loss and the gradients are off those in float64, the larger of the two."""
    loss, gradients, *_ = compare(exactly, rounded, Tolerances(relative=1.0))
    return max(loss.error, gradients.error)


def _shifted(gradient: Tensor | None, shift: float, generator: torch.Generator) -> Tensor | None:
    """A gradient with each entry moved by `shift`, up or down."""
    if gradient is None:
        return None
    sparse = gradient.layout == torch.sparse_coo  # As SparseAdam takes it.
    whole = gradient.coalesce().clone() if sparse else gradient.clone()
    values = whole.values() if sparse else whole
    signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    values.add_((signs.to(values.device) * shift).to(values.dtype))
    return whole


def _roundoff(parameter: Tensor) -> Tensor:
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return torch.zeros_like(parameter, dtype=torch.float64)
    return exact(parameter).abs() * torch.finfo(parameter.dtype).eps
