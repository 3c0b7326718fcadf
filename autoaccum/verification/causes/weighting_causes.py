"""Causes in the weighting: a wrong divisor, or one that is no count."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.causes.loss_factors import (
    SUM,
    Decomposition,
    Weighting,
    find_residual,
    find_weighting,
    flatten,
    workload_shares,
)
from autoaccum.verification.update_run import Ablation
from autoaccum.verification.verification_result import Cause
from autoaccum.workload.objective import Objective
from autoaccum.workload.weight_check import advise, name_term

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
