"""A divisor that no usual counting of the batch gives, or a function of a mean, which looks like one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoaccum.accumulation.company.words import listed
from autoaccum.errors import WorkloadError
from autoaccum.verification.causes.decomposition import Decomposition
from autoaccum.verification.causes.factors import find_residual, flatten
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.weights import own_shares
from autoaccum.verification.causes.words import numbers
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.records import Cause
from autoaccum.workload.batches import join_batches

_CLOSE = 1e-6
"""How near to one another equal shares are."""

_NOTHING = 1e-9
"""A part that has a gradient, and counts for no more than this: what the largest decides, and no count."""


def explain_factors(inquiry: Inquiry, change: Change, cuts: Sequence[Decomposition]) -> tuple[Cause, ...] | None:
    """Why the parts give the full batch by factors that no usual counting gives; None where that is not so.

    Args:
        inquiry: What came out unequal.
        change: What is otherwise in all runs.
        cuts: The batch in two parts and in three, under that change.
    """
    if any(cut.factors is None for cut in cuts) or len(cuts[0].whole.terms) > 1:
        return None
    own = Decomposition(inquiry.lab, change, inquiry.rounding)
    if own.factors is None or not _is_as_weighted(own, change, inquiry.rounding):
        return None
    right = own.factors.values
    if find_residual(own.gradient, own.gradients, own_shares(own.lab, list(own.whole.terms)) or ()) <= inquiry.rounding:
        return None  # The gradient is right, and only the loss differs.
    is_mean = min(right) > _NOTHING and math.isclose(sum(right), 1.0, rel_tol=_CLOSE)
    if is_mean and inquiry.is_equal(replace(change, weights=right)):
        if _is_drawn(inquiry, change, cuts):
            return (_drawn_cause(inquiry.lab, right),)
        if _adds_up(inquiry, change, cuts):
            return (_factors_cause(inquiry.lab, right),)
    return (_function_cause(),)


def _adds_up(inquiry: Inquiry, change: Change, cuts: Sequence[Decomposition]) -> bool:
    """Whether a union of two parts counts for what both count for, as it is with counts and not with other functions.

    Of two samples there is no such union, and nothing speaks against a count.
    """
    if len(cuts) < 2 or cuts[1].factors is None:
        return True
    (one, other, third), sizes = cuts[1].factors.values, cuts[1].lab.sizes
    union = inquiry.lab.with_sizes((sizes[0] + sizes[1], sizes[2]))
    return _has_factors(Decomposition(union, change, inquiry.rounding), (one + other, third))


def _is_drawn(inquiry: Inquiry, change: Change, cuts: Sequence[Decomposition]) -> bool:
    """Whether shares change with the draws: in the batch turned round, parts have those of one another."""
    last = cuts[-1]
    if change.calm or not inquiry.lab.draw_sites or last.factors is None:
        return False
    try:
        turned = Laboratory(inquiry.lab.specimen, join_batches(last.lab.parts[::-1]), last.lab.sizes[::-1])
    except WorkloadError:
        return False
    return not _has_factors(Decomposition(turned, change, inquiry.rounding), last.factors.values[::-1])


def _has_factors(cut: Decomposition, expected: Sequence[float]) -> bool:
    found = cut.factors
    return found is not None and all(
        math.isclose(one, other, abs_tol=_CLOSE) for one, other in zip(found.values, expected, strict=True)
    )


def _is_as_weighted(own: Decomposition, change: Change, rounding: float) -> bool:
    """Whether the accumulated gradient is that of the parts by the workload's own shares, and nothing else is wrong."""
    shares = own_shares(own.lab, list(own.whole.terms))
    accumulated = flatten(own.lab.accumulated(change).gradients, own.whole.parameters)
    return shares is not None and find_residual(accumulated, own.gradients, shares) <= rounding


def _factors_cause(lab: Laboratory, right: Sequence[float]) -> Cause:
    return Cause(
        kind="weight",
        found=f"parts of {numbers(lab.sizes)} samples are {_how(lab)}; right were {numbers(right)} of each",
        change="def weight(batch): return what the mean divides by; no usual counting of the batch gives these shares",
        proved=True,
    )


def _drawn_cause(lab: Laboratory, right: Sequence[float]) -> Cause:
    """A mean over what was drawn: how many there are in a part, nothing outside of forward can tell."""
    return Cause(
        kind="weight",
        found=(
            f"parts of {numbers(lab.sizes)} samples are {_how(lab)}; right were {numbers(right)} of each, which changes"
            f" with what is drawn in {listed(lab.draw_sites)}: the mean divides by a count of it"
        ),
        change=(
            'make the loss a sum over what is drawn and write reduction = "sum", or draw where the batch is made and'
            " count it in weight(batch)"
        ),
        where=lab.draw_sites,
        proved=True,
    )


def _function_cause() -> Cause:
    return Cause(
        kind="coupled loss",
        found=(
            "the gradients of the parts give the full batch's only by factors that no count gives: the loss is not a"
            " sum over samples that is divided by a count, but a function of one (a root, a norm, an exponential, the"
            " largest), or it divides by what does not add up over parts"
        ),
        change=(
            "return a sum over samples, divided by a count that adds up over parts, and take functions of it for what"
            " is reported only; as it is, no weight mends it: only the whole batch in one part gives its gradient"
        ),
        where=("the loss",),
    )


def _how(lab: Laboratory) -> str:
    return "added up" if lab.objective.reduction == "sum" else f"weighted by {lab.objective.source}"
