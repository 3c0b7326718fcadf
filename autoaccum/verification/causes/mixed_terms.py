"""Does a loss add up two terms that divide by different counts? Told from all unions of three parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.factors import flatten
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.weights import SUM
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.records import Cause
from autoaccum.workload.batches import batch_size, join_batches
from autoaccum.workload.candidates import Candidate, count_candidates

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
        rows = [_gradient(inquiry.lab, union, replace(change, calm=True)) for union in unions]
    except AutoaccumError:
        return None
    gradients = torch.stack(rows)
    candidates = _candidates(inquiry.lab.batch, unions)
    if any(_leaves_nothing(gradients, one, one, inquiry.rounding) for one in candidates):
        return None  # One count is enough for these parts, and what is wrong does not show in them.
    for one, other in combinations(candidates, 2):
        if _leaves_nothing(gradients, one, other, inquiry.rounding):
            return _cause(one.code, other.code)
    return None


def _gradient(lab: Laboratory, batch: object, change: Change) -> Tensor:
    outcome = Laboratory(lab.specimen, batch, (batch_size(batch),)).full(change)
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
