"""Is it only a matter of weighting? If so, what would be right."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autoaccum.accumulation.shares import make_shares
from autoaccum.verification.factors import Decomposition
from autoaccum.verification.inquiry import Inquiry
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

    def shares(self, parts: int) -> list[tuple[float, ...]]:
        """What each part is to be multiplied by, for each term."""
        return [(1.0,) * parts if counts is None else share(counts) for counts in self.counts.values()]


class Weigher:
    """Tries the usual weightings on two cuts of the batch.

    Args:
        inquiry: What came out unequal.
        change: What is otherwise in all runs.
    """

    def __init__(self, inquiry: Inquiry, change: Change) -> None:
        self._runs, self._objective = inquiry.runs, inquiry.runs.objective
        self.cuts = [Decomposition(runs, change, inquiry.rounding) for runs in inquiry.cuts]
        self._parts = [part for cut in self.cuts for part in cut.runs.parts] + list(self._runs.parts)
        self._terms = [name for name, term in self.cuts[0].whole.terms.items() if math.isfinite(term)]

    def find(self) -> Weighting | None:
        """The weighting under which the parts give the whole batch's loss and gradient; None where none is found."""
        likely = likely_code(self._runs.fixture.fresh().model)
        counted = count_candidates(self._runs.batch, self._parts, likely)
        usual = [Candidate(SUM, ()), *counted, *count_class_weights(self._runs, self._parts)]
        found: dict[str, Candidate] = {}
        for name, own in self._own().items():
            fitting = next((one for one in [own, *usual] if self._fits(name, one)), None)
            if fitting is None:
                return None
            found[name] = fitting
        start = len(self._parts) - len(self._runs.parts)
        return Weighting(
            {name: one.code for name, one in found.items() if one.code != _OWN},
            {name: one.counts[start:] or None for name, one in found.items()},
            next((one.code for one in usual[1:]), "len(batch)"),
        )

    def _own(self) -> dict[str, Candidate]:
        if self._objective.reduction == "sum":
            return {name: Candidate(_OWN, ()) for name in self._terms}
        every = list(self.cuts[0].whole.terms)
        weights = [match_weights(self._objective.weight(part), every) for part in self._parts]
        return {name: Candidate(_OWN, tuple(weight[name] for weight in weights)) for name in self._terms}

    def _fits(self, name: str, candidate: Candidate) -> bool:
        start = 0
        for cut in self.cuts:
            stop = start + len(cut.parts)
            shares = share(candidate.counts[start:stop]) if candidate.counts else (1.0,) * len(cut.parts)
            if not cut.gives_term(name, shares):
                return False
            if len(self._terms) == 1 and not cut.gives_gradient(shares):
                return False
            start = stop
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


def count_class_weights(runs: Runs, parts: list[Any]) -> list[Candidate]:
    """Sums of class weights over the labels of each of `parts`."""
    tables = {name: tensor for name, tensor in _named_tensors(runs) if _is_table(tensor)}
    return count_tables(runs.batch, parts, tables) if tables else []


def _named_tensors(runs: Runs) -> Iterator[tuple[str, Any]]:
    """What the loss names of its module and its closure, and the model's buffers."""
    function = runs.objective.loss_function
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        yield from {**named.globals, **named.nonlocals}.items()
    yield from ((f"model.{name}", buffer) for name, buffer in runs.fixture.fresh().model.named_buffers())


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point() and bool((value >= 0).all())
