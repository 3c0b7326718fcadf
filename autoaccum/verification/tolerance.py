"""What rounding explains, and where that bound comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from autoaccum.errors import NotMeasuredError
from autoaccum.verification.comparing import Tolerances, compare, exact, largest_entry
from autoaccum.verification.updates import UNCHANGED, Change, Outcome

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

    Args:
        runs: Of the batch, in `precision`.
        precision: `fp64`, `fp32`, `bf16` or `fp16`.
        samples: Of the batch.
        double: Of the same batch on the same device in float64; None where that does not run.

    Raises:
        NotMeasuredError: Rounding in that precision is as large as the gradient.
    """
    if precision == "fp64":
        words = f"{DOUBLE:.0e} of the largest entry, in float64; for the update also what the optimizer makes of"
        return Tolerances(relative=DOUBLE, rounding=f"{words} gradients that are off by so much")
    roundoff = _ROUNDOFF[precision]
    least = _LEAST_ROUNDOFFS * roundoff
    if double is None:
        relative = least * math.sqrt(samples)
        words = (
            f"what {precision} may be off: 8 unit roundoffs of {roundoff:.1e} times the root of {samples} samples, as"
            " the workload does not run in float64 here"
        )
    else:
        distance = _distance(runs.full(Change(calm=True)), double.full(Change(calm=True)))
        if not _MARGIN * distance < 1:
            raise NotMeasuredError(
                f"the full batch's own gradient in {precision} is {distance:.0%} off that in float64: rounding hides"
                " whatever accumulation does",
                hint="verify with --precision fp64",
            )
        relative = max(_MARGIN * distance, least)
        words = (
            f"4 times the distance of the full batch's loss and gradient in {precision} from float64 ({distance:.1e}),"
            f" at least 8 unit roundoffs ({least:.1e})"
        )
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


def allow_own(tolerances: Tolerances, runs: _Runs, other: Outcome) -> Tolerances:
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
