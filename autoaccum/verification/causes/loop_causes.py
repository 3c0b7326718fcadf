"""Causes in the user's own accumulation loop: the factor of each part's gradient, and the line that mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoaccum.accumulation.coupling import list_names
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.causes.weighting_causes import (
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

LoopMistake = Literal[
    "zeroed", "left out", "undivided", "divided twice", "mean of means", "constant", "scaled", "uneven"
]

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

_CLOSE = 1e-6
"""The largest relative difference between equal factors."""

_NONE = 1e-12
"""A gradient below this share of the full gradient's largest entry counts as none."""


@dataclass(frozen=True)
class SplitFactors:
    """The factors by which a loop multiplied the gradients of a window's parts, and the right ones, their shares."""

    factors: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.factors)

    @property
    def ratios(self) -> list[float]:
        """Factor over share of each part that should count."""
        return [factor / share for factor, share in zip(self.factors, self.shares, strict=True) if share > 0]

    @property
    def common(self) -> float | None:
        """The factor of all parts; None where they differ."""
        return _constant(self.factors)

    @property
    def ratio(self) -> float | None:
        """The ratio of factor to share of all parts; None where it differs."""
        return _constant(self.ratios)


def find_mistake(split: SplitFactors, other: SplitFactors | None = None) -> LoopMistake | None:
    """Name what is wrong with the factors; None where they are the shares.

    `other`, the same window in another number of parts, shows whether a divisor is fixed or counts the parts.

    >>> find_mistake(SplitFactors((1.0, 1.0), (0.5, 0.5)))
    'undivided'
    >>> find_mistake(SplitFactors((0.25, 0.25), (0.5, 0.5)), SplitFactors((1 / 9,) * 3, (1 / 3,) * 3))
    'divided twice'
    >>> find_mistake(SplitFactors((0.25, 0.25), (0.5, 0.5)), SplitFactors((0.25,) * 3, (1 / 3,) * 3))
    'constant'
    """
    if is_close(split.ratio, 1.0):
        return None
    pairs = enumerate(zip(split.factors, split.shares, strict=True))
    missing = [index for index, (factor, share) in pairs if abs(factor) <= _CLOSE * share]
    if missing:
        return "zeroed" if missing == list(range(split.parts - 1)) and split.parts > 1 else "left out"
    splits = [split] if other is None else [split, other]
    if all(is_close(one.common, 1.0) or is_close(one.ratio, float(one.parts)) for one in splits):
        return "undivided"
    if all(is_close(one.common, 1 / one.parts) for one in splits):
        return "mean of means"
    if all(is_close(one.common, 1 / one.parts**2) or is_close(one.ratio, 1 / one.parts) for one in splits):
        return "divided twice"
    if other is not None and _is_fixed(split, other):
        return "constant"
    return "uneven" if split.ratio is None else "scaled"


def is_close(one: float | None, two: float) -> bool:
    """Return whether two numbers are equal to rounding."""
    return one is not None and abs(one - two) <= _CLOSE * max(abs(one), abs(two))


def _is_fixed(split: SplitFactors, other: SplitFactors) -> bool:
    """Return whether parts are divided by the same number, whatever the number of parts."""
    same_factor = split.common is not None and is_close(other.common, split.common)
    return same_factor or (split.ratio is not None and split.ratio < 1 and is_close(other.ratio, split.ratio))


def _constant(values: Sequence[float]) -> float | None:
    return values[0] if values and all(is_close(value, values[0]) for value in values) else None


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
