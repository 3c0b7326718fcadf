"""Parts that do not add up to the full batch: a wrong weighting, a sum's regulariser, or two terms in one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from autoaccum.accumulation.coupling import listed
from autoaccum.errors import AutoaccumError, WorkloadError
from autoaccum.verification.factors import Decomposition, find_residual, flatten, numbers
from autoaccum.verification.inquiry import Inquiry
from autoaccum.verification.records import Cause
from autoaccum.verification.runs import Runs
from autoaccum.verification.updates import Change
from autoaccum.verification.weights import SUM, Weigher, Weighting, own_shares
from autoaccum.workload.batches import batch_size, join_batches
from autoaccum.workload.candidates import Candidate, count_candidates
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
    return (weight_cause(inquiry.runs.objective, found, proved=proved),) if proved or applied is None else None


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
    parts = len(inquiry.runs.sizes)
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
    objective = inquiry.runs.objective
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
    times = float(len(inquiry.runs.sizes) - 1)
    return find_residual(full, [accumulated, once], (1.0, -times)) <= inquiry.rounding


def _is_constant(name: str, term: float, cuts: Sequence[Decomposition], rounding: float) -> bool:
    losses = [part.terms.get(name, math.nan) for cut in cuts for part in cut.parts]
    return all(abs(loss - term) <= rounding * max(abs(term), 1e-300) for loss in losses)


def _called(names: Sequence[str]) -> str:
    return listed([name_term(name) for name in names]) if names else "a part of the loss"


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
    own = Decomposition(inquiry.runs, change, inquiry.rounding)
    if own.factors is None or not _is_as_weighted(own, change, inquiry.rounding):
        return None
    right = own.factors.values
    if (
        find_residual(own.gradient, own.gradients, own_shares(own.runs, list(own.whole.terms)) or ())
        <= inquiry.rounding
    ):
        return None  # The gradient is right, and only the loss differs.
    is_mean = min(right) > _NOTHING and math.isclose(sum(right), 1.0, rel_tol=_CLOSE)
    if is_mean and inquiry.is_equal(replace(change, weights=right)):
        if _is_drawn(inquiry, change, cuts):
            return (_drawn_cause(inquiry.runs, right),)
        if _adds_up(inquiry, change, cuts):
            return (_factors_cause(inquiry.runs, right),)
    return (_function_cause(),)


def _adds_up(inquiry: Inquiry, change: Change, cuts: Sequence[Decomposition]) -> bool:
    """Whether a union of two parts counts for what both count for, as it is with counts and not with other functions.

    Of two samples there is no such union, and nothing speaks against a count.
    """
    if len(cuts) < 2 or cuts[1].factors is None:
        return True
    (one, other, third), sizes = cuts[1].factors.values, cuts[1].runs.sizes
    union = inquiry.runs.with_sizes((sizes[0] + sizes[1], sizes[2]))
    return _has_factors(Decomposition(union, change, inquiry.rounding), (one + other, third))


def _is_drawn(inquiry: Inquiry, change: Change, cuts: Sequence[Decomposition]) -> bool:
    """Whether shares change with the draws: in the batch turned round, parts have those of one another."""
    last = cuts[-1]
    if change.calm or not inquiry.runs.draw_sites or last.factors is None:
        return False
    try:
        turned = Runs(inquiry.runs.fixture, join_batches(last.runs.parts[::-1]), last.runs.sizes[::-1])
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
    shares = own_shares(own.runs, list(own.whole.terms))
    accumulated = flatten(own.runs.accumulated(change).gradients, own.whole.parameters)
    return shares is not None and find_residual(accumulated, own.gradients, shares) <= rounding


def _factors_cause(runs: Runs, right: Sequence[float]) -> Cause:
    return Cause(
        kind="weight",
        found=f"parts of {numbers(runs.sizes)} samples are {_how(runs)}; right were {numbers(right)} of each",
        change="def weight(batch): return what the mean divides by; no usual counting of the batch gives these shares",
        proved=True,
    )


def _drawn_cause(runs: Runs, right: Sequence[float]) -> Cause:
    """A mean over what was drawn: how many there are in a part, nothing outside of forward can tell."""
    return Cause(
        kind="weight",
        found=(
            f"parts of {numbers(runs.sizes)} samples are {_how(runs)}; right were {numbers(right)} of each, which"
            f" changes with what is drawn in {listed(runs.draw_sites)}: the mean divides by a count of it"
        ),
        change=(
            'make the loss a sum over what is drawn and write reduction = "sum", or draw where the batch is made and'
            " count it in weight(batch)"
        ),
        where=runs.draw_sites,
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


def _how(runs: Runs) -> str:
    return "added up" if runs.objective.reduction == "sum" else f"weighted by {runs.objective.source}"


_MOST_CANDIDATES = 16
_UNIONS = [union for size in (1, 2, 3) for union in combinations(range(3), size)]


def explain_mixed_terms(inquiry: Inquiry, change: Change) -> Cause | None:
    """The cause where two counts explain every union of three parts; None where no two do.

    The gradient of a union S is a(S) / n(S) + b(S) / m(S), with a and b sums over its parts and n and m the counts:
    seven gradients of six unknown ones, so that two counts which do not divide the terms are told by what is left.
    """
    if len(inquiry.cuts) < 2:
        return None
    parts = inquiry.cuts[1].parts
    try:
        unions = [join_batches([parts[index] for index in union]) for union in _UNIONS]
        rows = [_gradient(inquiry.runs, union, replace(change, calm=True)) for union in unions]
    except AutoaccumError:
        return None
    gradients = torch.stack(rows)
    candidates = _candidates(inquiry.runs.batch, unions)
    if any(_leaves_nothing(gradients, one, one, inquiry.rounding) for one in candidates):
        return None  # One count is enough for these parts, and what is wrong does not show in them.
    for one, other in combinations(candidates, 2):
        if _leaves_nothing(gradients, one, other, inquiry.rounding):
            return _cause(one.code, other.code)
    return None


def _gradient(runs: Runs, batch: object, change: Change) -> Tensor:
    outcome = Runs(runs.fixture, batch, (batch_size(batch),)).full(change)
    return flatten(outcome.gradients, outcome.parameters)


def _candidates(batch: object, unions: Sequence[object]) -> list[Candidate]:
    """Countings that can be told apart, and none that divides by zero."""
    found: dict[tuple[float, ...], Candidate] = {}
    for candidate in (Candidate(SUM, (1.0,) * len(unions)), *count_candidates(batch, list(unions))):
        if min(candidate.counts) > 0:
            found.setdefault(candidate.shares(0), candidate)
    return list(found.values())[:_MOST_CANDIDATES]


def _leaves_nothing(gradients: Tensor, one: Candidate, other: Candidate, rounding: float) -> bool:
    """Whether all gradients lie in what two sums, divided by these counts, can give."""
    columns = [
        [float(part in union) / count for union, count in zip(_UNIONS, candidate.counts, strict=True)]
        for candidate in (one, other)
        for part in range(3)
    ]
    given = torch.tensor(columns, dtype=torch.float64).T
    given = given / given.norm(dim=0)
    left, singular, _ = torch.linalg.svd(given, full_matrices=True)
    rank = int((singular > 1e-9 * singular[0]).sum())
    remainder = left[:, rank:].T @ gradients
    return bool(remainder.abs().max() <= rounding * gradients.abs().max())


def _cause(one: str, other: str) -> Cause:
    named = [f"one that divides by {code}" for code in (one, other) if code != SUM]
    if SUM in (one, other):
        named.append("one that is a sum")
    return Cause(
        kind="weight",
        found=f"the loss adds up two terms, {' and '.join(named)}: no common weights of the parts serve both",
        change=(
            "make the sum a mean, return both terms as a dict from loss, and from weight(batch) what each divides by"
            if SUM in (one, other)
            else f'return both as a dict from loss, and def weight(batch): return {{"one": {one}, "other": {other}}}'
        ),
    )
