"""Causes in the user's own accumulation loop: the factor of each part's gradient, and the line that mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoaccum.accumulation.coupling import list_names
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.causes.loop_factors import (
    LoopMistake,
    SplitFactors,
    find_mistake,
)
from autoaccum.verification.causes.loss_factors import (
    SUM,
    Decomposition,
    find_factors,
    find_residual,
    flatten,
    numbers,
    share,
    workload_shares,
)
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_comparison import largest_entry
from autoaccum.verification.update_run import Ablation, UpdateResult
from autoaccum.verification.verification_result import Cause, CauseKind
from autoaccum.workload.weight_candidates import list_candidates

_FOUND: Mapping[LoopMistake, str] = {
    "zeroed": "only the last part counts: gradients are zeroed between the parts, or backward() is called once after"
    " the loop, for the last loss only",
    "left out": "some parts are left out: {counts}",
    "undivided": "the losses of the parts are added up without dividing them: {counts}",
    "divided twice": "the losses of the parts are divided twice: {counts}",
    "mean of means": "the mean of every part counts the same, though parts divide by different counts: {counts}",
    "constant": "the losses are divided by a fixed number, whatever the number of parts (here {parts}): {counts}",
    "scaled": "the parts are divided by a wrong number: {counts}",
    "uneven": "the parts have wrong weights: {counts}",
}
_CHANGES: Mapping[LoopMistake, str] = {
    "zeroed": "call backward() for every part, within the loop, and zero_grad() once, before the first part",
    "left out": "run every part of the window forward and backward",
}

_APART = "the ranks end with different gradients: each has that of its own samples"
_JOIN = "wrap the model in DistributedDataParallel, or sum .grad over the ranks (dist.all_reduce) before the update"
_OF_ALL_RANKS = (
    "; sum the total over all ranks first (dist.all_reduce), and multiply by dist.get_world_size(), since DDP and FSDP"
    " divide by it"
)

_NONE = 1e-12
"""A gradient below this share of the full gradient's largest entry counts as none."""


def explain_loop(experiment: Experiment, ablation: Ablation) -> tuple[Cause, ...] | None:
    """Explain what the loop does wrong under `ablation`; None where even the Accumulator's gradient differs."""
    runs = experiment.runs
    try:
        if runs.user_loop(ablation).spread > experiment.rounding:
            return _loop_cause(_APART, _JOIN, kind="ranks")
        parts = Decomposition(runs, ablation, experiment.rounding)
        shares, counted = _find_shares(parts) or ((), "")
        split = _fit_factors(experiment, parts, shares) if shares else None
        if split is None:
            return _explain_other_gradient(experiment, parts, ablation)
        other = _fit_other_split(experiment, ablation)
    except AutoaccumError:
        return None
    mistake = find_mistake(split, other)
    counts = f"they count for {numbers(split.factors)}, but should count for {numbers(split.shares)}"
    if mistake is None:
        return None
    mistake = "scaled" if mistake == "mean of means" and counted == SUM else mistake
    found = _FOUND[mistake].format(counts=counts, parts=split.parts)
    kind: CauseKind = "last window" if mistake == "constant" and experiment.window == "last" else "accumulate"
    change = _CHANGES.get(mistake) or _correct_line(runs, counted)
    if len(runs.parts_by_rank) > 1:
        kind, change = "ranks", change if mistake in _CHANGES else change + _OF_ALL_RANKS
    return _loop_cause(found, change, kind=kind, proved=True)


def _loop_cause(
    found: str, change: str, *, kind: CauseKind = "accumulate", where: tuple[str, ...] = (), proved: bool = False
) -> tuple[Cause]:
    return (Cause(kind=kind, found=found, change=change, where=where, proved=proved),)


def _explain_other_gradient(
    experiment: Experiment, parts: Decomposition, ablation: Ablation
) -> tuple[Cause, ...] | None:
    """Explain a loop whose gradient is no combination of the parts', where the Accumulator's is the full batch's."""
    accumulated = flatten(parts.runs.accumulated(ablation).gradients, parts.whole.parameters)
    if find_residual(parts.gradient, [accumulated], (1.0,)) > experiment.rounding:
        return None
    unreached = _unreached_parameters(parts.whole, parts.runs.user_loop(ablation))
    if unreached:
        found = f"the loop's gradient does not reach {list_names(unreached)}, but the full batch's does"
        whole = "backpropagate the whole of loss(model, part): no .detach(), .item() or no_grad() on its terms"
        return _loop_cause(found, whole, kind="detached", where=unreached)
    if not workload_shares(parts.runs, list(parts.whole.terms)):
        return _loop_cause(
            "the terms of the loss divide by different counts, but the loop does not weight each by its own",
            "weight each term of each part by weight(part)[name] / total[name], where total is the sum over all parts"
            " of the window; then call backward() on the sum of the terms",
        )
    gradients = (experiment.differences(ablation) or {}).get("gradients")
    return _loop_cause(
        "the loop's gradient is not a combination of the gradients of loss(model, part)",
        "compute the loss of each part in the loop as loss(model, part) does",
        where=() if gradients is None or gradients.where is None else (gradients.where,),
    )


def _unreached_parameters(full: UpdateResult, own: UpdateResult) -> tuple[str, ...]:
    """Return the parameters that only the full batch's gradient reaches; empty where the loop reaches none at all."""
    least = _NONE * largest_entry(full.gradients.values())
    reached = {name for name, one in full.gradients.items() if largest_entry([one]) > least}
    found = tuple(name for name in full.gradients if name in reached and largest_entry([own.gradients[name]]) <= least)
    return () if len(found) == len(full.gradients) else found


def _fit_factors(experiment: Experiment, parts: Decomposition, shares: tuple[float, ...]) -> SplitFactors | None:
    """Find the factor of each part in the loop's gradient; None where no factors of the parts give it."""
    own = flatten(parts.runs.user_loop(parts.ablation).gradients, parts.whole.parameters)
    found = find_factors(own, parts.gradients)
    if found is None or found.residual > experiment.rounding:
        return None
    return SplitFactors(tuple(0.0 if abs(one) < experiment.rounding else one for one in found.values), shares)


def _fit_other_split(experiment: Experiment, ablation: Ablation) -> SplitFactors | None:
    """Find the factors of the same window in another number of parts."""
    runs = next((one for one in experiment.splits if len(one.sizes) != len(experiment.runs.sizes)), None)
    if runs is None:
        return None
    parts = Decomposition(runs, ablation, experiment.rounding)
    right = _find_shares(parts)
    return None if right is None else _fit_factors(experiment, parts, right[0])


def _find_shares(parts: Decomposition) -> tuple[tuple[float, ...], str] | None:
    """Return the right share of each part, and what they count, in words or code; None where no count is right."""
    runs, objective = parts.runs, parts.runs.objective
    own = workload_shares(runs, list(parts.whole.terms))
    if own is not None and parts.gives_gradient(own):
        return own, SUM if objective.reduction == "sum" else objective.source
    return next(((shares, code) for shares, code in _usual_shares(runs) if parts.gives_gradient(shares)), None)


def _usual_shares(runs: PairedRuns) -> Iterator[tuple[tuple[float, ...], str]]:
    yield (1.0,) * len(runs.parts), SUM
    for candidate in list_candidates(runs.batch, runs.parts):
        yield share(candidate.counts), candidate.code


def _correct_line(runs: PairedRuns, counted: str) -> str:
    if counted == SUM:
        return "loss(model, part).backward(), without dividing: the loss is a sum"
    what = f"weight(batch): return {counted}"
    if counted == runs.objective.source:
        what = "weight(part)" if runs.objective.weight_function else f"its {counted.partition(' (')[0]}"
    return (
        f"(loss(model, part) * count / total).backward(), where count is the part's ({what}) and total is the sum over"
        " all parts of the window"
    )
