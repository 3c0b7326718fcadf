"""Parts that do not add up to the full batch: a wrong weighting, a sum's regulariser, or two terms in one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from autoaccum.accumulation.coupling import list_names
from autoaccum.errors import AutoaccumError, WorkloadError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.causes.loss_factors import (
    SUM,
    Decomposition,
    Weighting,
    find_residual,
    find_weighting,
    flatten,
    numbers,
    workload_shares,
)
from autoaccum.verification.paired_runs import Runs
from autoaccum.verification.update_run import Change
from autoaccum.verification.verification_result import Cause
from autoaccum.workload.batches import batch_size, join_batches
from autoaccum.workload.objective import Objective
from autoaccum.workload.weight_candidates import Candidate, list_candidates
from autoaccum.workload.weight_check import advise, name_term

_ALL = 1e-3
"""Nearer to the full gradient, it is no regulariser that counts too often, but all of the loss."""

_CLOSE = 1e-6
"""How near to one another equal shares are."""

_NOTHING = 1e-9
"""A part that has a gradient, and counts for no more than this: what the largest decides, and no count."""

_MOST_CANDIDATES = 16
_UNIONS = [union for size in (1, 2, 3) for union in combinations(range(3), size)]

_FUNCTION = Cause(
    kind="coupled loss",
    found=(
        "the gradients of the parts give the full batch's only by factors that no count gives: the loss is not a sum"
        " over samples that is divided by a count, but a function of one (a root, a norm, an exponential, the largest),"
        " or it divides by what does not add up over parts"
    ),
    change=(
        "return a sum over samples, divided by a count that adds up over parts, and take functions of it for what is"
        " reported only; as it is, no weight mends it: only the whole batch in one part gives its gradient"
    ),
    where=("the loss",),
)

_WAY_OUT = (
    "leave it to the optimizer (weight_decay), or make the loss a mean and leave the reduction away: of a mean, parts"
    " count it by their shares"
)


def explain_weighting(experiment: Experiment, change: Change) -> tuple[Cause, ...] | None:
    """Why the parts do not add up to the full batch under `change`, where that is arithmetic; None where it is not."""
    try:
        cuts = [Decomposition(runs, change, experiment.rounding) for runs in experiment.cuts]
        weighed = _explain_weights(experiment, change, cuts)
        if weighed and weighed[0].proved:
            return weighed
        return _explain_regulariser(experiment, change, cuts) or weighed or _explain_factors(experiment, change, cuts)
    except AutoaccumError:
        return None


def _explain_weights(experiment: Experiment, change: Change, cuts: Sequence[Decomposition]) -> tuple[Cause, ...] | None:
    found = find_weighting(experiment.runs, cuts)
    if found is None or not found.wrong:
        return None
    applied = found.applied(change)
    proved = applied is not None and experiment.is_equal(applied)
    return (_weight_cause(experiment.runs.objective, found, proved=proved),) if proved or applied is None else None


def _weight_cause(objective: Objective, found: Weighting, *, proved: bool) -> Cause:
    """The wrong weighting, and what to write instead."""
    how = "added up" if objective.reduction == "sum" else f"weighted by {objective.source}"
    divided = {name: "is a sum" if code == SUM else f"divides by {code}" for name, code in found.wrong.items()}
    facts = " and ".join(f"{name_term(name)} {does}" for name, does in divided.items())
    return Cause(
        kind="reduction" if objective.reduction == "sum" or SUM in found.wrong.values() else "weight",
        found=f"{facts}, and the parts are {how}",
        change=advise(objective, found.wrong, found.counts, found.samples, tested=True),
        where=tuple(found.wrong) if len(found.counts) > 1 else (),
        proved=proved,
    )


def _explain_regulariser(
    experiment: Experiment, change: Change, cuts: Sequence[Decomposition]
) -> tuple[Cause, ...] | None:
    """A term that every part has whole: each part more adds it once more."""
    if len(cuts) < 2:
        return None
    two, rounding = cuts[0], experiment.rounding
    once, twice = (torch.stack(cut.gradients).sum(0) - cut.gradient for cut in cuts)
    constant, doubled = (sum(part.loss for part in cut.parts) - cut.whole.loss for cut in cuts)
    allowed = rounding * max(float(two.gradient.abs().max()), 1e-300)
    if float((twice - 2 * once).abs().max()) > allowed or float(once.abs().max()) <= allowed:
        return None
    if abs(doubled - 2 * constant) > rounding * max(abs(two.whole.loss), abs(constant), 1e-300):
        return None
    if find_residual(two.gradient, [once], (1.0,)) <= _ALL:
        return None
    pair, parts = experiment.pair(replace(change, summed=True, weights=None)), len(experiment.runs.sizes)
    if pair is None:
        return None
    full, accumulated = (flatten(outcome.gradients, pair[0].parameters) for outcome in pair)
    if find_residual(full, [accumulated, once], (1.0, 1.0 - parts)) > rounding:
        return None
    names = [name for name, term in two.whole.terms.items() if _is_constant(name, term, cuts, rounding)]
    called = list_names([name_term(name) for name in names]) if names else "a part of the loss"
    counts = f"is the same for any batch, and of a sum it counts once for each of the {parts} parts"
    found = f"{called} ({constant:.6g}) {counts}"
    cause = Cause(kind="regulariser", found=found, change=_WAY_OUT, where=tuple(names), proved=True)
    objective = experiment.runs.objective
    if objective.reduction == "sum":
        return (cause,)
    terms = list(two.whole.terms)
    wrong = Weighting(dict.fromkeys(terms, SUM), dict.fromkeys(terms), SUM)
    return _weight_cause(objective, wrong, proved=True), cause


def _is_constant(name: str, term: float, cuts: Sequence[Decomposition], rounding: float) -> bool:
    losses = [part.terms.get(name, math.nan) for cut in cuts for part in cut.parts]
    return all(abs(loss - term) <= rounding * max(abs(term), 1e-300) for loss in losses)


def _explain_factors(experiment: Experiment, change: Change, cuts: Sequence[Decomposition]) -> tuple[Cause, ...] | None:
    """Why the parts (`cuts` in two and in three) give the full batch by factors that no usual counting gives.

    None where that is not so, something else is wrong beside, or the gradient is right and only the loss differs.
    """
    if any(cut.factors is None for cut in cuts) or len(cuts[0].whole.terms) > 1:
        return None
    own = Decomposition(experiment.runs, change, experiment.rounding)
    shares = workload_shares(own.runs, list(own.whole.terms))
    accumulated = flatten(own.runs.accumulated(change).gradients, own.whole.parameters)
    if own.factors is None or shares is None or own.gives_gradient(shares):
        return None
    if find_residual(accumulated, own.gradients, shares) > experiment.rounding:
        return None
    right = own.factors.values
    is_mean = min(right) > _NOTHING and math.isclose(sum(right), 1.0, rel_tol=_CLOSE)
    if is_mean and experiment.is_equal(replace(change, weights=right)):
        if _is_drawn(experiment, change, cuts):
            return (_share_cause(experiment.runs, right, experiment.runs.draw_sites),)
        if _adds_up(experiment, change, cuts):
            return (_share_cause(experiment.runs, right),)
    return (_FUNCTION,)


def _adds_up(experiment: Experiment, change: Change, cuts: Sequence[Decomposition]) -> bool:
    """Whether a union of two parts counts for what both count for, as it is with counts and not with other functions.

    Of two samples there is no such union, and nothing speaks against a count.
    """
    if len(cuts) < 2 or cuts[1].factors is None:
        return True
    (one, other, third), sizes = cuts[1].factors.values, cuts[1].runs.sizes
    union = experiment.runs.with_sizes((sizes[0] + sizes[1], sizes[2]))
    return _has_factors(Decomposition(union, change, experiment.rounding), (one + other, third))


def _is_drawn(experiment: Experiment, change: Change, cuts: Sequence[Decomposition]) -> bool:
    """Whether shares change with the draws: in the batch turned round, parts have those of one another."""
    last = cuts[-1]
    if change.calm or not experiment.runs.draw_sites or last.factors is None:
        return False
    try:
        turned = Runs(experiment.runs.fixture, join_batches(last.runs.parts[::-1]), last.runs.sizes[::-1])
    except WorkloadError:
        return False
    return not _has_factors(Decomposition(turned, change, experiment.rounding), last.factors.values[::-1])


def _has_factors(cut: Decomposition, expected: Sequence[float]) -> bool:
    found = cut.factors
    return found is not None and all(
        math.isclose(one, other, abs_tol=_CLOSE) for one, other in zip(found.values, expected, strict=True)
    )


def _share_cause(runs: Runs, right: Sequence[float], drawn: tuple[str, ...] = ()) -> Cause:
    """Shares that no usual counting gives; those of a mean over what was `drawn` show only within forward."""
    how = "added up" if runs.objective.reduction == "sum" else f"weighted by {runs.objective.source}"
    found = f"parts of {numbers(runs.sizes)} samples are {how}; right were {numbers(right)} of each"
    change = "def weight(batch): return what the mean divides by; no usual counting of the batch gives these shares"
    if drawn:
        found += f", which changes with what is drawn in {list_names(drawn)}: the mean divides by a count of it"
        change = (
            'make the loss a sum over what is drawn and write reduction = "sum", or draw where the batch is made and'
            " count it in weight(batch)"
        )
    return Cause(kind="weight", found=found, change=change, where=drawn, proved=True)


def explain_mixed_terms(experiment: Experiment, change: Change) -> Cause | None:
    """The cause where two counts explain every union of three parts; None where no two do.

    The gradient of a union S is a(S) / n(S) + b(S) / m(S), with a and b sums over its parts and n and m the counts:
    seven gradients of six unknown ones, so that two counts which do not divide the terms are told by what is left.
    """
    if len(experiment.cuts) < 2:
        return None
    fixture, parts = experiment.runs.fixture, experiment.cuts[1].parts
    try:
        unions = [join_batches([parts[index] for index in union]) for union in _UNIONS]
        full = [Runs(fixture, one, (batch_size(one),)).full(replace(change, calm=True)) for one in unions]
    except AutoaccumError:
        return None
    gradients = torch.stack([flatten(one.gradients, one.parameters) for one in full])
    candidates = _candidates(experiment.runs.batch, unions)
    if any(_leaves_nothing(gradients, one, one, experiment.rounding) for one in candidates):
        return None  # One count is enough for these parts, and what is wrong does not show in them.
    for one, other in combinations(candidates, 2):
        if _leaves_nothing(gradients, one, other, experiment.rounding):
            return _mixed_cause(one.code, other.code)
    return None


def _candidates(batch: object, unions: Sequence[object]) -> list[Candidate]:
    """Countings that can be told apart, and none that divides by zero."""
    found: dict[tuple[float, ...], Candidate] = {}
    for candidate in (Candidate(SUM, (1.0,) * len(unions)), *list_candidates(batch, list(unions))):
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


def _mixed_cause(one: str, other: str) -> Cause:
    named = [f"one that divides by {code}" for code in (one, other) if code != SUM]
    change = f'return both as a dict from loss, and def weight(batch): return {{"one": {one}, "other": {other}}}'
    if SUM in (one, other):
        named.append("one that is a sum")
        change = (
            "make the sum a mean, return both terms as a dict from loss, and from weight(batch) what each divides by"
        )
    found = f"the loss adds up two terms, {' and '.join(named)}: no common weights of the parts serve both"
    return Cause(kind="weight", found=found, change=change)
