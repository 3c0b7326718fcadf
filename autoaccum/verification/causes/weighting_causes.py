"""Causes in the weighting: the factors by which parts add up to the batch, and the divisor that gives them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import make_shares
from autoaccum.accumulation.random_ops import neutral_rng
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import Ablation, UpdateResult, UpdateRun
from autoaccum.verification.verification_result import Cause
from autoaccum.workload.model_loss import likely_weight_code
from autoaccum.workload.objective import Objective, match_weights
from autoaccum.workload.weight_candidates import Candidate, class_weight_candidates, list_candidates
from autoaccum.workload.weight_check import BatchLosses, LossComparison, advise, name_term, narrow

_MOST_ENTRIES = 2**18
_LEAST_DISTINCT = 1e-5
"""The least independent share of a part's gradient: with less, rounding would decide the factors."""


_FUNCTION = Cause(
    kind="coupled loss",
    found=(
        "the parts' gradients add up to the full batch's only with factors that no count in the batch explains: the"
        " loss is a function of a mean (a root, a norm, an exponential, a maximum), or its divisor does not add up over"
        " parts, or is not in the batch"
    ),
    change=(
        "return a mean whose divisor adds up over parts, and apply such functions only to what you log, or write def"
        " weight(batch) if you know the divisor; otherwise define outputs(model, batch) and coupled_loss(outputs,"
        " batch) with coupled = True, which compute the loss once, over the whole batch"
    ),
    where=("the loss",),
)


@dataclass(frozen=True)
class Factors:
    """The factors of the parts that come closest to a gradient.

    `residual` is the largest error of that combination, relative to the gradient's largest entry.
    """

    values: tuple[float, ...]
    residual: float


def flatten(gradients: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> Tensor:
    """Return the gradients of the parameters `like` as one row in float64 on the CPU; None counts as zeros.

    Of more than a quarter of a million entries only every n-th is taken: any of them shows the factors.
    """
    stride = max(1, -(-sum(parameter.numel() for parameter in like.values()) // _MOST_ENTRIES))
    rows = [torch.zeros(0, dtype=torch.float64)]
    for name, parameter in like.items():
        found = gradients.get(name)
        gradient = torch.zeros_like(parameter) if found is None else found
        dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
        rows.append(dense.reshape(-1)[::stride].to("cpu", torch.float64))
    return torch.cat(rows)


def find_factors(target: Tensor, parts: Sequence[Tensor]) -> Factors | None:
    """Find the factors with which `parts` add up to `target`; None where the parts do not determine them.

    >>> one, two = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([0.0, 1.0, 1.0]).double()
    >>> [round(factor, 9) for factor in find_factors(0.75 * one + 0.25 * two, [one, two]).values]
    [0.75, 0.25]
    >>> find_factors(one, [two, two]) is None
    True
    """
    if not target.numel() or not all(bool(row.isfinite().all()) for row in (target, *parts)):
        return None
    columns = torch.stack(list(parts), dim=1)
    norms = columns.norm(dim=0)
    if columns.shape[0] <= columns.shape[1] or not bool((norms > 0).all()):
        return None
    orthogonal, triangle = torch.linalg.qr(columns / norms)
    if float(triangle.diagonal().abs().min()) < _LEAST_DISTINCT:
        return None
    scaled = torch.linalg.solve_triangular(triangle, (orthogonal.T @ target)[:, None], upper=True)[:, 0]
    values = tuple((scaled / norms).tolist())
    return Factors(values, find_residual(target, parts, values))


def find_residual(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> float:
    """Return the largest error of `parts` times `factors`, relative to the largest entry of `target`.

    Parts with factor 0 are left out. A result that is NaN is returned as infinite.
    """
    left = target.clone()
    for row, factor in zip(parts, factors, strict=True):
        if factor != 0:
            left -= factor * row
    scale = max(float(target.abs().max()) if target.numel() else 0.0, 1e-300)
    error = float(left.abs().max()) / scale if left.numel() else 0.0
    return error if error == error else float("inf")


class Decomposition:
    """A batch and its parts, each run alone under one ablation; equal combinations may differ by `rounding`.

    Attributes:
        whole: The full batch's update.
        gradient: The full batch's gradient, flat.
        gradients: The parts' gradients, flat.
        parts: The result of each part alone, without its tensors, which would fill the memory.
    """

    def __init__(self, runs: PairedRuns, ablation: Ablation, rounding: float) -> None:
        self.runs, self.ablation, self._rounding = runs, ablation, rounding
        self.whole: UpdateResult = runs.full(ablation)
        self.gradient: Tensor = flatten(self.whole.gradients, self.whole.parameters)
        self.gradients: list[Tensor] = []
        self.parts: list[UpdateResult] = []
        for index in range(len(runs.sizes)):
            part = runs.part(index, ablation)
            self.gradients.append(flatten(part.gradients, self.whole.parameters))
            self.parts.append(replace(part, gradients={}, buffers={}, parameters={}))

    @cached_property
    def factors(self) -> Factors | None:
        """The factors with which the parts give the full gradient; None where there are none, or many."""
        found = find_factors(self.gradient, self.gradients)
        return None if found is None or found.residual > self._rounding else found

    def gives_gradient(self, shares: Sequence[float]) -> bool:
        """Return whether the parts times `shares` add up to the full gradient."""
        return find_residual(self.gradient, self.gradients, shares) <= self._rounding

    def gives_term(self, name: str, shares: Sequence[float]) -> bool:
        """Return whether the parts times `shares` add up to this term of the full batch's loss."""
        losses = [part.terms.get(name, 0.0) for part in self.parts]
        counted = [(loss, share) for loss, share in zip(losses, shares, strict=True) if share != 0]
        whole = self.whole.terms[name]
        scale = max([abs(whole), *(abs(loss) for loss, _ in counted)])
        return abs(sum(loss * share for loss, share in counted) - whole) <= self._rounding * max(scale, 1e-300)


LARGER = "a larger micro-batch comes closer, and only the whole batch in one part gives the exact gradient"
"""The advice where parts cannot be exact."""

_ROUNDING = 1e-12


def numbers(values: Sequence[float]) -> str:
    """Write numbers to four digits; what is only rounding is written as 0.

    >>> numbers([0.5, 1 / 3]), numbers([-2e-16, 1.0])
    ('0.5 and 0.3333', '0 and 1')
    """
    least = _ROUNDING * max((abs(value) for value in values), default=0.0)
    words = [f"{0.0 if abs(value) <= least else value:.4g}" for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


SUM = "sum"
"""Stands for the divisor of a loss that is a sum."""

_LOSS_TOLERANCE = 1e-6
"""How much losses of other batches may differ, relative to the largest."""

_OWN = ""
"""Stands for the workload's own weighting."""


@dataclass(frozen=True)
class Weighting:
    """The divisors of the terms of a loss.

    Attributes:
        wrong: The right divisor, an expression of `batch` or `SUM`, of each term that the workload weights wrongly.
        counts: The divisor of each term in every part; None for a sum.
        samples: The expression that counts samples.
        batches: How many batches it fits.
    """

    wrong: dict[str, str]
    counts: dict[str, tuple[float, ...] | None]
    samples: str
    batches: int = 1

    def applied(self, ablation: Ablation) -> Ablation | None:
        """Return `ablation` with this weighting in place of the workload's; None where weights cannot express it."""
        columns = {name: counts for name, counts in self.counts.items() if counts is not None}
        if not columns:
            return replace(ablation, sum_losses=True)
        if len(columns) < len(self.counts):
            return None
        if len(set(columns.values())) == 1:
            return replace(ablation, weights=next(iter(columns.values())))
        rows = zip(*columns.values(), strict=True)
        return replace(ablation, weights=tuple(tuple(zip(columns, row, strict=True)) for row in rows))


def find_weighting(runs: PairedRuns, splits: Sequence[Decomposition]) -> Weighting | None:
    """Find a usual weighting under which the parts of all `splits` give the batch's loss and gradient.

    If several do, those that fit other batches too are preferred, in which they count differently.
    """
    objective = runs.objective
    parts = [part for split in splits for part in split.runs.parts] + list(runs.parts)
    every = list(splits[0].whole.terms)
    terms = [name for name in every if math.isfinite(splits[0].whole.terms[name])]
    own = {name: Candidate(_OWN, ()) for name in terms}
    if objective.reduction == "mean":
        weights = [match_weights(objective.weight(part), every) for part in parts]
        own = {name: Candidate(_OWN, tuple(weight[name] for weight in weights)) for name in terms}
    usual = _usual_candidates(runs, parts)
    found: dict[str, Candidate] = {}
    fits: dict[str, list[Candidate]] = {}
    for name in terms:
        fits[name] = [one for one in [own[name], *usual] if _fits(splits, name, one.counts, alone=len(terms) == 1)]
        if not fits[name]:
            return None
        found[name] = fits[name][0]
    wrong, agreed = [name for name, one in found.items() if one.code != _OWN], 0
    if wrong:
        others = _other_batches(runs, splits[0].ablation)
        apart = _usual_candidates(runs, [part for other in others for part in other.parts])
        for name in wrong:
            codes = {one.code: one for one in fits[name]}
            kept, agreed = narrow(name, [one for one in apart if one.code in codes], others, 0, _LOSS_TOLERANCE)
            found[name] = codes[kept[0].code] if kept else found[name]
    start = len(parts) - len(runs.parts)
    return Weighting(
        {name: found[name].code for name in wrong},
        {name: one.counts[start:] or None for name, one in found.items()},
        next((one.code for one in usual[1:]), "len(batch)"),
        1 + agreed,
    )


def _usual_candidates(runs: PairedRuns, parts: list[Any]) -> list[Candidate]:
    counted = list_candidates(runs.batch, parts, likely_weight_code(runs.fixture.fresh().model))
    return [Candidate(SUM, ()), *counted, *_count_class_weights(runs, parts)]


def _other_batches(runs: PairedRuns, ablation: Ablation) -> list[LossComparison]:
    """Compare the losses of batches in which what is usually counted differs, and those of two parts, forward only."""

    def forward(batch: Any) -> Mapping[str, Tensor]:
        run = UpdateRun(runs.fixture, ablation)
        seed_everything()
        with run.running("the loss"), torch.no_grad(), neutral_rng():
            return run.terms(batch)

    total = sum(runs.sizes)
    losses = BatchLosses(runs.fixture.fresh().model, runs.objective, runs.batch, forward)
    return losses.compare_apart(runs.batch, [total // 2, total - total // 2])


def _fits(splits: Sequence[Decomposition], name: str, counts: Sequence[float], *, alone: bool) -> bool:
    """Return whether parts with these counts (none for a sum) give a term; a single term's gradient as well."""
    waiting = iter(counts)
    for split in splits:
        parts = len(split.parts)
        shares = share(list(islice(waiting, parts))) if counts else (1.0,) * parts
        if not split.gives_term(name, shares) or (alone and not split.gives_gradient(shares)):
            return False
    return True


def workload_shares(runs: PairedRuns, terms: Sequence[str]) -> tuple[float, ...] | None:
    """Return the factors by which the workload multiplies the parts; None where they differ between terms."""
    objective = runs.objective
    if objective.reduction == "sum":
        return (1.0,) * len(runs.parts)
    weights = [match_weights(objective.weight(part), terms) for part in runs.parts]
    columns = {share([weight[name] for weight in weights]) for name in terms}
    return columns.pop() if len(columns) == 1 else None


def share(counts: Sequence[float]) -> tuple[float, ...]:
    """Return the factors of parts with these counts in a mean; all 0 where nothing counts.

    >>> share((3.0, 1.0))
    (0.75, 0.25)
    """
    return tuple(float(one) for one in make_shares(counts, "mean") if not isinstance(one, dict))


def _count_class_weights(runs: PairedRuns, parts: list[Any]) -> list[Candidate]:
    """Count by class weights that the loss names or the model keeps in a buffer, summed over each part's labels."""
    function = runs.objective.loss_function
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    named = {f"model.{name}": buffer for name, buffer in runs.fixture.fresh().model.named_buffers()}
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        named = {**variables.globals, **variables.nonlocals, **named}
    tables = {name: one for name, one in named.items() if isinstance(one, Tensor) and _is_table(one)}
    return class_weight_candidates(runs.batch, parts, tables) if tables else []


def _is_table(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and tensor.is_floating_point() and bool((tensor >= 0).all())


def explain_weighting(experiment: Experiment, ablation: Ablation) -> tuple[Cause, ...] | None:
    """Explain by arithmetic why the parts do not add up to the full batch under `ablation`; None where it cannot."""
    try:
        splits = [Decomposition(runs, ablation, experiment.rounding) for runs in experiment.splits]
        weighed = _explain_weights(experiment, ablation, splits)
        return weighed or _explain_factors(experiment, ablation, splits)
    except AutoaccumError:
        return None


def _explain_weights(
    experiment: Experiment, ablation: Ablation, splits: Sequence[Decomposition]
) -> tuple[Cause, ...] | None:
    found = find_weighting(experiment.runs, splits)
    if found is None or not found.wrong:
        return None
    applied = found.applied(ablation)
    proved = applied is not None and experiment.is_equal(applied)
    return (_weight_cause(experiment.runs.objective, found, proved=proved),) if proved or applied is None else None


def _weight_cause(objective: Objective, found: Weighting, *, proved: bool) -> Cause:
    """Return the cause for a wrong weighting, with the line to write instead."""
    how = "added up" if objective.reduction == "sum" else f"weighted by {objective.source}"
    divided = {name: "is a sum" if code == SUM else f"divides by {code}" for name, code in found.wrong.items()}
    terms = " and ".join(f"{name_term(name)} {does}" for name, does in divided.items())
    return Cause(
        kind="reduction" if objective.reduction == "sum" or SUM in found.wrong.values() else "weight",
        found=f"{terms}, but the parts are {how}",
        change=advise(objective, found.wrong, found.counts, found.samples),
        where=tuple(found.wrong) if len(found.counts) > 1 else (),
        proved=proved,
        batches=None if SUM in found.wrong.values() else found.batches,
    )


def _explain_factors(
    experiment: Experiment, ablation: Ablation, splits: Sequence[Decomposition]
) -> tuple[Cause, ...] | None:
    """Explain parts that give the full batch with factors that no usual count gives (`splits`: two and three parts).

    None where that is not so, where something else is wrong too, or where only the loss differs.
    """
    if any(split.factors is None for split in splits) or len(splits[0].whole.terms) > 1:
        return None
    own = Decomposition(experiment.runs, ablation, experiment.rounding)
    shares = workload_shares(own.runs, list(own.whole.terms))
    accumulated = flatten(own.runs.accumulated(ablation).gradients, own.whole.parameters)
    if own.factors is None or shares is None or own.gives_gradient(shares):
        return None
    if find_residual(accumulated, own.gradients, shares) > experiment.rounding:
        return None
    return (_FUNCTION,)
