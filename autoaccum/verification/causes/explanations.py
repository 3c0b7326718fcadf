"""What remains when nothing that couples samples is in the way: a wrong weighting, or a sum's regulariser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from autoaccum.accumulation.company.words import listed
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.decomposition import Decomposition
from autoaccum.verification.causes.divisors import explain_factors
from autoaccum.verification.causes.factors import find_residual, flatten
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.weights import SUM, Weigher, Weighting
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.records import Cause
from autoaccum.workload.comparisons import name_term
from autoaccum.workload.weighting import advise
from autoaccum.workload.weights import Objective

_ALL = 1e-3
"""Nearer to the full gradient, it is no regulariser that counts too often, but all of the loss."""

_WAY_OUT = (
    "leave it to the optimizer (weight_decay), or make the loss a mean and leave the reduction away: of a mean, parts"
    " count it by their shares"
)


def explain_parts(inquiry: Inquiry, change: Change) -> tuple[Cause, ...] | None:
    """Why the parts do not add up to the full batch under `change`, where that is arithmetic; None where it is not."""
    try:
        weigher = Weigher(inquiry, change)
        weighed = _explain_weights(inquiry, change, weigher)
        if weighed and weighed[0].proved:
            return weighed
        regularised = _explain_regulariser(inquiry, change, weigher.cuts)
        return regularised or weighed or explain_factors(inquiry, change, weigher.cuts)
    except AutoaccumError:
        return None


def _explain_weights(inquiry: Inquiry, change: Change, weigher: Weigher) -> tuple[Cause, ...] | None:
    found = weigher.find()
    if found is None or not found.wrong:
        return None
    applied = found.applied(change)
    proved = applied is not None and inquiry.is_equal(applied)
    return (weight_cause(inquiry.lab.objective, found, proved=proved),) if proved or applied is None else None


def weight_cause(objective: Objective, found: Weighting, *, proved: bool) -> Cause:
    """The wrong weighting, and what to write instead."""
    is_reduction = objective.reduction == "sum" or SUM in found.wrong.values()
    how = "added up" if objective.reduction == "sum" else f"weighted by {objective.source}"
    facts = [
        f"{name_term(name)} {'is a sum' if code == SUM else f'divides by {code}'}" for name, code in found.wrong.items()
    ]
    several = len(found.counts) > 1
    return Cause(
        kind="reduction" if is_reduction else "weight",
        found=f"{' and '.join(facts)}, and the parts are {how}",
        change=advise(objective, found.wrong, found.counts, found.samples, sure=True),
        where=tuple(found.wrong) if several else (),
        proved=proved,
    )


def _explain_regulariser(inquiry: Inquiry, change: Change, cuts: Sequence[Decomposition]) -> tuple[Cause, ...] | None:
    """A term that every part has whole: each part more adds it once more."""
    if len(cuts) < 2:
        return None
    two, three = cuts
    once, twice = _excess(two), _excess(three)
    losses = _excess_losses(two), _excess_losses(three)
    scale = max(float(two.gradient.abs().max()), 1e-300)
    if not _is_multiple(twice, once, 2.0, inquiry.rounding * scale) or float(once.abs().max()) <= (
        inquiry.rounding * scale
    ):
        return None
    constant = losses[0]
    if find_residual(two.gradient, [once], (1.0,)) <= _ALL:
        return None
    if abs(losses[1] - 2 * constant) > inquiry.rounding * max(abs(two.whole.loss), abs(constant), 1e-300):
        return None
    if not _is_mended(inquiry, replace(change, summed=True, weights=None), once):
        return None
    names = [name for name, term in two.whole.terms.items() if _is_constant(name, term, cuts, inquiry.rounding)]
    parts = len(inquiry.lab.sizes)
    cause = Cause(
        kind="regulariser",
        found=(
            f"{_called(names)} ({constant:.6g}) is the same for any batch, and of a sum it counts once for each of the"
            f" {parts} parts"
        ),
        change=_WAY_OUT,
        where=tuple(names),
        proved=True,
    )
    objective = inquiry.lab.objective
    if objective.reduction == "sum":
        return (cause,)
    terms = list(two.whole.terms)
    wrong = Weighting(dict.fromkeys(terms, SUM), dict.fromkeys(terms), SUM)
    return weight_cause(objective, wrong, proved=True), cause


def _excess(cut: Decomposition) -> Tensor:
    total = cut.gradients[0].clone()
    for gradient in cut.gradients[1:]:
        total += gradient
    return total - cut.gradient


def _excess_losses(cut: Decomposition) -> float:
    return sum(part.loss for part in cut.parts) - cut.whole.loss


def _is_multiple(one: Tensor, other: Tensor, factor: float, allowed: float) -> bool:
    return bool((one - factor * other).abs().max() <= allowed)


def _is_mended(inquiry: Inquiry, summed: Change, once: Tensor) -> bool:
    """Whether the accumulated sum, less what counts too often, is the full batch's."""
    pair = inquiry.pair(summed)
    if pair is None:
        return False
    full, accumulated = (flatten(outcome.gradients, pair[0].parameters) for outcome in pair)
    times = float(len(inquiry.lab.sizes) - 1)
    return find_residual(full, [accumulated, once], (1.0, -times)) <= inquiry.rounding


def _is_constant(name: str, term: float, cuts: Sequence[Decomposition], rounding: float) -> bool:
    losses = [part.terms.get(name, math.nan) for cut in cuts for part in cut.parts]
    return all(abs(loss - term) <= rounding * max(abs(term), 1e-300) for loss in losses)


def _called(names: Sequence[str]) -> str:
    return listed([name_term(name) for name in names]) if names else "a part of the loss"
