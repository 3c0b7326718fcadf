"""Causes in the weighting: a wrong divisor, or a regulariser in a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

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
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import Ablation
from autoaccum.verification.verification_result import Cause
from autoaccum.workload.batches import join_batches
from autoaccum.workload.objective import Objective
from autoaccum.workload.weight_check import advise, name_term

_ALL = 1e-3
"""Closer to the full gradient than this, the repeated term is no regulariser but the whole loss."""

_CLOSE = 1e-6
"""The largest difference between equal shares."""

_NOTHING = 1e-9
"""A part that counts for no more than this has no count: a maximum decides."""

_FUNCTION = Cause(
    kind="coupled loss",
    found=(
        "the gradients of the parts give the full batch's only with factors that no count explains: the loss is not a"
        " sum over samples divided by a count, but a function of it (a root, a norm, an exponential, a maximum), or it"
        " divides by something that does not add up over parts"
    ),
    change=(
        "return a sum over samples divided by a count that adds up over parts, and apply such functions only to what"
        " is reported; no weight helps here, but outputs(model, batch) and coupled_loss(outputs, batch) with coupled ="
        " True do: the loss is then computed once, of the whole batch"
    ),
    where=("the loss",),
)

_WAY_OUT = (
    "leave it to the optimizer (weight_decay), or make the loss a mean and remove the reduction: in a mean, each part"
    " counts the term by its share"
)


def explain_weighting(experiment: Experiment, ablation: Ablation) -> tuple[Cause, ...] | None:
    """Explain by arithmetic why the parts do not add up to the full batch under `ablation`; None where it cannot."""
    try:
        splits = [Decomposition(runs, ablation, experiment.rounding) for runs in experiment.splits]
        weighed = _explain_weights(experiment, ablation, splits)
        if weighed and weighed[0].proved:
            return weighed
        return (
            _explain_regulariser(experiment, ablation, splits)
            or weighed
            or _explain_factors(experiment, ablation, splits)
        )
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


def _explain_regulariser(
    experiment: Experiment, ablation: Ablation, splits: Sequence[Decomposition]
) -> tuple[Cause, ...] | None:
    """Explain a term that every part contains in full, so that each further part adds it again."""
    if len(splits) < 2:
        return None
    two, rounding = splits[0], experiment.rounding
    once, twice = (torch.stack(split.gradients).sum(0) - split.gradient for split in splits)
    constant, doubled = (sum(part.loss for part in split.parts) - split.whole.loss for split in splits)
    allowed = rounding * max(float(two.gradient.abs().max()), 1e-300)
    if float((twice - 2 * once).abs().max()) > allowed or float(once.abs().max()) <= allowed:
        return None
    if abs(doubled - 2 * constant) > rounding * max(abs(two.whole.loss), abs(constant), 1e-300):
        return None
    if find_residual(two.gradient, [once], (1.0,)) <= _ALL:
        return None
    pair, parts = experiment.pair(replace(ablation, sum_losses=True, weights=None)), len(experiment.runs.sizes)
    if pair is None:
        return None
    full, accumulated = (flatten(outcome.gradients, pair[0].parameters) for outcome in pair)
    if find_residual(full, [accumulated, once], (1.0, 1.0 - parts)) > rounding:
        return None
    names = [name for name, term in two.whole.terms.items() if _is_constant(name, term, splits, rounding)]
    called = list_names([name_term(name) for name in names]) if names else "a part of the loss"
    counts = f"is the same for any batch, and in a sum it counts once for each of the {parts} parts"
    found = f"{called} ({constant:.6g}) {counts}"
    cause = Cause(kind="regulariser", found=found, change=_WAY_OUT, where=tuple(names), proved=True)
    objective = experiment.runs.objective
    if objective.reduction == "sum":
        return (cause,)
    terms = list(two.whole.terms)
    wrong = Weighting(dict.fromkeys(terms, SUM), dict.fromkeys(terms), SUM)
    return _weight_cause(objective, wrong, proved=True), cause


def _is_constant(name: str, term: float, splits: Sequence[Decomposition], rounding: float) -> bool:
    losses = [part.terms.get(name, math.nan) for split in splits for part in split.parts]
    return all(abs(loss - term) <= rounding * max(abs(term), 1e-300) for loss in losses)


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
    right = own.factors.values
    is_mean = min(right) > _NOTHING and math.isclose(sum(right), 1.0, rel_tol=_CLOSE)
    if is_mean and experiment.is_equal(replace(ablation, weights=right)):
        if _depends_on_rng(experiment, ablation, splits):
            return (_share_cause(experiment.runs, right, experiment.runs.rng_sites),)
        if _adds_up(experiment, ablation, splits):
            return (_share_cause(experiment.runs, right),)
    return (_FUNCTION,)


def _adds_up(experiment: Experiment, ablation: Ablation, splits: Sequence[Decomposition]) -> bool:
    """Return whether two parts joined count for the sum of both, as counts do and other functions do not.

    Two samples have no such union; then a count is assumed.
    """
    if len(splits) < 2 or splits[1].factors is None:
        return True
    (one, other, third), sizes = splits[1].factors.values, splits[1].runs.sizes
    union = experiment.runs.with_sizes((sizes[0] + sizes[1], sizes[2]))
    return _has_factors(Decomposition(union, ablation, experiment.rounding), (one + other, third))


def _depends_on_rng(experiment: Experiment, ablation: Ablation, splits: Sequence[Decomposition]) -> bool:
    """Return whether shares follow the random numbers: with the parts in reverse order, they do not move along."""
    last = splits[-1]
    if ablation.neutral_rng or not experiment.runs.rng_sites or last.factors is None:
        return False
    try:
        backwards = PairedRuns(experiment.runs.fixture, join_batches(last.runs.parts[::-1]), last.runs.sizes[::-1])
    except WorkloadError:
        return False
    return not _has_factors(Decomposition(backwards, ablation, experiment.rounding), last.factors.values[::-1])


def _has_factors(split: Decomposition, expected: Sequence[float]) -> bool:
    found = split.factors
    return found is not None and all(
        math.isclose(one, other, abs_tol=_CLOSE) for one, other in zip(found.values, expected, strict=True)
    )


def _share_cause(runs: PairedRuns, right: Sequence[float], drawn: tuple[str, ...] = ()) -> Cause:
    """Return the cause for shares that no usual count gives; `drawn` names random numbers that a mean counts."""
    how = "added up" if runs.objective.reduction == "sum" else f"weighted by {runs.objective.source}"
    found = f"parts of {numbers(runs.sizes)} samples are {how}; the right shares are {numbers(right)}"
    change = "def weight(batch): return what the mean divides by; no usual count of the batch gives these shares"
    if drawn:
        found += f"; they depend on random numbers drawn in {list_names(drawn)}: the mean divides by a count of these"
        change = (
            'make the loss a sum over what is drawn and write reduction = "sum", or draw where the batch is made and'
            " count there, in weight(batch)"
        )
    return Cause(kind="weight", found=found, change=change, where=drawn, proved=True)
