"""Is it only a matter of weighting? If so, what would be right."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from autoaccum.accumulation.backpropagation import make_shares
from autoaccum.verification.factors import Decomposition
from autoaccum.verification.runs import Runs
from autoaccum.verification.updates import Change
from autoaccum.workload.candidates import Candidate, count_candidates, count_tables
from autoaccum.workload.own_loss import likely_code
from autoaccum.workload.weights import match_weights

SUM = "sum"
"""The code of a loss that nothing divides."""

_OWN = ""
"""The code of the workload's own weighting."""


@dataclass(frozen=True)
class Weighting:
    """What the terms of a loss divide by.

    Attributes:
        wrong: An expression of `batch`, or `SUM`, for each term that the workload weighs otherwise.
        counts: By term, what it divides by in each part as it was cut; None for a sum.
        samples: The expression that counts samples.
    """

    wrong: dict[str, str]
    counts: dict[str, tuple[float, ...] | None]
    samples: str

    def applied(self, change: Change) -> Change | None:
        """`change`, with this weighting in place of the workload's own; None where no weights do that."""
        columns = {name: counts for name, counts in self.counts.items() if counts is not None}
        if not columns:
            return replace(change, summed=True)
        if len(columns) < len(self.counts):
            return None
        if len(set(columns.values())) == 1:
            return replace(change, weights=next(iter(columns.values())))
        rows = zip(*columns.values(), strict=True)
        return replace(change, weights=tuple(tuple(zip(columns, row, strict=True)) for row in rows))


def find_weighting(runs: Runs, cuts: Sequence[Decomposition]) -> Weighting | None:
    """The usual weighting under which the parts of `cuts` give the whole batch's loss and gradient; None: none does."""
    objective = runs.objective
    parts = [part for cut in cuts for part in cut.runs.parts] + list(runs.parts)
    every = list(cuts[0].whole.terms)
    terms = [name for name in every if math.isfinite(cuts[0].whole.terms[name])]
    own = {name: Candidate(_OWN, ()) for name in terms}
    if objective.reduction == "mean":
        weights = [match_weights(objective.weight(part), every) for part in parts]
        own = {name: Candidate(_OWN, tuple(weight[name] for weight in weights)) for name in terms}
    counted = count_candidates(runs.batch, parts, likely_code(runs.fixture.fresh().model))
    usual = [Candidate(SUM, ()), *counted, *_count_class_weights(runs, parts)]
    found: dict[str, Candidate] = {}
    for name in terms:
        alone = len(terms) == 1
        fitting = next((one for one in [own[name], *usual] if _fits(cuts, name, one.counts, alone=alone)), None)
        if fitting is None:
            return None
        found[name] = fitting
    start = len(parts) - len(runs.parts)
    return Weighting(
        {name: one.code for name, one in found.items() if one.code != _OWN},
        {name: one.counts[start:] or None for name, one in found.items()},
        next((one.code for one in usual[1:]), "len(batch)"),
    )


def _fits(cuts: Sequence[Decomposition], name: str, counts: Sequence[float], *, alone: bool) -> bool:
    """Whether parts of these counts (none: of a sum) give a term, and the gradient of a term that is alone."""
    waiting = iter(counts)
    for cut in cuts:
        parts = len(cut.parts)
        shares = share(list(islice(waiting, parts))) if counts else (1.0,) * parts
        if not cut.gives_term(name, shares) or (alone and not cut.gives_gradient(shares)):
            return False
    return True


def own_shares(runs: Runs, terms: Sequence[str]) -> tuple[float, ...] | None:
    """What the workload multiplies the parts by; None where that differs from term to term."""
    objective = runs.objective
    if objective.reduction == "sum":
        return (1.0,) * len(runs.parts)
    weights = [match_weights(objective.weight(part), terms) for part in runs.parts]
    columns = {share([weight[name] for weight in weights]) for name in terms}
    return columns.pop() if len(columns) == 1 else None


def share(counts: Sequence[float]) -> tuple[float, ...]:
    """What parts with these counts are multiplied by in a mean; all 0 where nothing counts.

    >>> share((3.0, 1.0))
    (0.75, 0.25)
    """
    return tuple(float(one) for one in make_shares(counts, "mean").parts if not isinstance(one, dict))


def _count_class_weights(runs: Runs, parts: list[Any]) -> list[Candidate]:
    """Sums over the labels of each part of class weights, which the loss names or the model keeps in a buffer."""
    function = runs.objective.loss_function
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    named = {f"model.{name}": buffer for name, buffer in runs.fixture.fresh().model.named_buffers()}
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        named = {**variables.globals, **variables.nonlocals, **named}
    tables = {name: one for name, one in named.items() if isinstance(one, Tensor) and _is_table(one)}
    return count_tables(runs.batch, parts, tables) if tables else []


def _is_table(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and tensor.is_floating_point() and bool((tensor >= 0).all())
