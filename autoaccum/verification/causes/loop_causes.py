"""A loop of the user's own: what each of its parts counts for, and which line would be right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from autoaccum.accumulation.coupling import list_names
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
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
from autoaccum.verification.paired_runs import Runs
from autoaccum.verification.update_comparison import largest_entry
from autoaccum.verification.update_run import Change, Outcome
from autoaccum.verification.verification_result import Cause, CauseKind
from autoaccum.workload.weight_candidates import list_candidates

_FOUND: Mapping[LoopMistake, str] = {
    "zeroed": "only the last part counts: gradients are zeroed between the parts, or backward() is called after the"
    " loop, of the last loss only",
    "left out": "some parts are left out: {counts}",
    "undivided": "the losses of the parts are added up undivided: {counts}",
    "divided twice": "the losses of the parts are divided twice: {counts}",
    "mean of means": "every part's mean counts alike, though parts divide by different counts: {counts}",
    "constant": "the losses are divided by a fixed number, here of {parts} parts: {counts}",
    "scaled": "the parts are wrongly divided: {counts}",
    "uneven": "the parts are wrongly weighted: {counts}",
}
_CHANGES: Mapping[LoopMistake, str] = {
    "zeroed": "call backward() for every part, within the loop, and zero_grad() once, before the first part",
    "left out": "run every part of the window forward and backward",
}

_NONE = 1e-12
"""Of the largest entry of the full gradient: below, there is no gradient."""

_LEAST_SHARE = 1e3
"""How much smaller than the gradient such a term may be: its rounding is that of the gradient."""


def explain_loop(experiment: Experiment, change: Change) -> tuple[Cause, ...] | None:
    """What the loop does to its parts under `change`; None where not even the Accumulator gives the full gradient."""
    runs = experiment.runs
    try:
        parts = Decomposition(runs, change, experiment.rounding)
        shares, counted = _find_shares(parts) or ((), "")
        cut = _read(experiment, parts, shares) if shares else None
        if cut is None:
            return _made_otherwise(experiment, parts, change)
        other = _read_otherwise(experiment, change)
        norm, scale = _round_norm(runs.own(change)), find_loss_scale(cut, other)
    except AutoaccumError:
        return None
    fault = find_mistake(cut, other)
    counts = f"they count for {numbers(cut.factors)}, their shares are {numbers(cut.shares)}"
    if scale is not None:
        undo = "leave the loss scale out of accumulate(), or undo it at its end, as scaler.unscale_(optimizer) does"
        return _told(
            f"gradients are left multiplied by {scale:g}, as by a GradScaler: {counts}",
            undo if is_close(cut.ratio, scale) else f"{undo}; and {_right_line(runs, counted)}",
            proved=True,
        )
    if norm is not None and (fault in ("constant", "scaled") or _shrinks(cut.ratios)):
        found = f"the loop clips the gradient: its norm is {norm:g}, and that of the full batch is not clipped here"
        return _told(found, "leave clipping out of accumulate(): clip once per update, after it")
    if fault is None:
        return None
    fault = "scaled" if fault == "mean of means" and counted == SUM else fault
    found = _FOUND[fault].format(counts=counts, parts=cut.parts)
    kind: CauseKind = "last window" if fault == "constant" and experiment.window == "last" else "accumulate"
    return _told(found, _CHANGES.get(fault) or _right_line(runs, counted), kind=kind, proved=True)


def _told(
    found: str, change: str, *, kind: CauseKind = "accumulate", where: tuple[str, ...] = (), proved: bool = False
) -> tuple[Cause]:
    return (Cause(kind=kind, found=found, change=change, where=where, proved=proved),)


def _made_otherwise(experiment: Experiment, parts: Decomposition, change: Change) -> tuple[Cause, ...] | None:
    """Why the loop's gradient is made of something else, where the Accumulator's is the full batch's."""
    accumulated = flatten(parts.runs.accumulated(change).gradients, parts.whole.parameters)
    if find_residual(parts.gradient, [accumulated], (1.0,)) > experiment.rounding:
        return None
    unreached = _unreached(parts.whole, parts.runs.own(change))
    if unreached:
        found = f"the loop's gradient does not reach {list_names(unreached)}, the full batch's does"
        whole = "backpropagate the whole of loss(model, part): no .detach(), .item() or no_grad() on its terms"
        return _told(found, whole, kind="detached", where=unreached)
    if _counts_with_parts(experiment, parts, change):
        return _told(
            "the loop's gradient is the full batch's, and once more for each part but the first a term that is the"
            " same for any batch, as a regulariser is",
            "multiply that term by the share of the part as well, as (loss + term) * count / total, or add it once in"
            " a window",
            kind="regulariser",
            proved=True,
        )
    if not workload_shares(parts.runs, list(parts.whole.terms)):
        return _told(
            "the terms of the loss divide by different counts, and the loop does not give each its own share",
            "for each term of each part: term * weight(part)[name] / total[name], where total is that of all parts of"
            " the window; then backward() of their sum",
        )
    gradients = (experiment.differences(change) or {}).get("gradients")
    return _told(
        "the loop's gradient is made of something else than the gradients of loss(model, part)",
        "compute the loss of a part in the loop as loss(model, part) does",
        where=() if gradients is None or gradients.where is None else (gradients.where,),
    )


def _unreached(full: Outcome, own: Outcome) -> tuple[str, ...]:
    """Some parameters, not all, that the full batch's gradient reaches and the loop's does not."""
    least = _NONE * largest_entry(full.gradients.values())
    reached = {name for name, one in full.gradients.items() if largest_entry([one]) > least}
    found = tuple(name for name in full.gradients if name in reached and largest_entry([own.gradients[name]]) <= least)
    return () if len(found) == len(full.gradients) else found


def _counts_with_parts(experiment: Experiment, parts: Decomposition, change: Change) -> bool:
    """Whether its gradient is the full batch's and, for each part but one, once more what is the same for any."""
    other = _cut_otherwise(experiment)
    if other is None or min(len(parts.runs.sizes), len(other.sizes)) < 2:
        return False
    once, again = (
        (flatten(runs.own(change).gradients, parts.whole.parameters) - parts.gradient) / (len(runs.sizes) - 1)
        for runs in (parts.runs, other)
    )
    return find_residual(once, [again], (1.0,)) <= experiment.rounding * _LEAST_SHARE


def _cut_otherwise(experiment: Experiment) -> Runs | None:
    """The same batch in another number of parts."""
    return next((one for one in experiment.cuts if len(one.sizes) != len(experiment.runs.sizes)), None)


def _read(experiment: Experiment, parts: Decomposition, shares: tuple[float, ...]) -> Cut | None:
    """What each part counts for, beside what it should; None where the gradient is made of something else."""
    own = flatten(parts.runs.own(parts.change).gradients, parts.whole.parameters)
    found = find_factors(own, parts.gradients)
    if found is None or found.residual > experiment.rounding:
        return None
    return Cut(tuple(0.0 if abs(one) < experiment.rounding else one for one in found.values), shares)


def _read_otherwise(experiment: Experiment, change: Change) -> Cut | None:
    """The same of another number of parts."""
    runs = _cut_otherwise(experiment)
    if runs is None:
        return None
    parts = Decomposition(runs, change, experiment.rounding)
    right = _find_shares(parts)
    return None if right is None else _read(experiment, parts, right[0])


def _round_norm(own: Outcome) -> float | None:
    """The norm of a gradient that was clipped; None where it is no number that a person would clip to.

    `clip_grad_norm_` divides by the norm plus 1e-6 (torch/nn/utils/clip_grad.py).
    """
    rows = [gradient.norm() for gradient in own.gradients.values() if gradient is not None]
    norm = float(torch.stack(rows).norm()) if rows else 0.0
    rounded = float(f"{norm:.1g}")
    return rounded if 0 <= rounded - norm <= 1e-4 * rounded else None


def _find_shares(parts: Decomposition) -> tuple[tuple[float, ...], str] | None:
    """What parts should count for, and what is counted, in words or as code; None where no one number is right."""
    runs, objective = parts.runs, parts.runs.objective
    own = workload_shares(runs, list(parts.whole.terms))
    if own is not None and parts.gives_gradient(own):
        return own, SUM if objective.reduction == "sum" else objective.source
    return next(((shares, code) for shares, code in _usual_shares(runs) if parts.gives_gradient(shares)), None)


def _usual_shares(runs: Runs) -> Iterator[tuple[tuple[float, ...], str]]:
    yield (1.0,) * len(runs.parts), SUM
    for candidate in list_candidates(runs.batch, runs.parts):
        yield share(candidate.counts), candidate.code


def _right_line(runs: Runs, counted: str) -> str:
    if counted == SUM:
        return "loss(model, part).backward(), without dividing: the loss is a sum"
    what = f"weight(batch): return {counted}"
    if counted == runs.objective.source:
        what = "weight(part)" if runs.objective.weight_function else f"its {counted.partition(' (')[0]}"
    return (
        f"(loss(model, part) * count / total).backward(), where count is a part's own ({what}), and total that of all"
        " parts of the window"
    )


LoopMistake = Literal[
    "zeroed", "left out", "undivided", "divided twice", "mean of means", "constant", "scaled", "uneven"
]

_CLOSE = 1e-6

_LEAST_SCALE = 2.0**8
"""A smaller factor may be a count of parts or samples."""


@dataclass(frozen=True)
class Cut:
    """One window, cut and accumulated by the loop.

    Attributes:
        factors: What each part's gradient was multiplied by.
        shares: What would have been right.
    """

    factors: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def parts(self) -> int:
        """How many parts it has."""
        return len(self.factors)

    @property
    def ratios(self) -> list[float]:
        """How many times too large the factors are of the parts that should count."""
        return [factor / share for factor, share in zip(self.factors, self.shares, strict=True) if share > 0]

    @property
    def common(self) -> float | None:
        """The factor, where all parts have the same."""
        return _constant(self.factors)

    @property
    def ratio(self) -> float | None:
        """How many times too large every part's factor is, where it is the same for all."""
        return _constant(self.ratios)


def _shrinks(ratios: Sequence[float]) -> bool:
    """Whether every part counts for more of its share than the one before, as where each clips what there is."""
    grows = all(one <= two * (1 + _CLOSE) for one, two in itertools.pairwise(ratios))
    return bool(ratios) and 0 < ratios[0] < ratios[-1] <= 1 and grows


def find_mistake(cut: Cut, other: Cut | None = None) -> LoopMistake | None:
    """What is wrong with the factors; None where they are the shares.

    Args:
        cut: The window as it was accumulated.
        other: The same window in another number of parts, which tells a divisor that is fixed from one that counts.

    >>> find_mistake(Cut((1.0, 1.0), (0.5, 0.5)))
    'undivided'
    >>> find_mistake(Cut((0.25, 0.25), (0.5, 0.5)), Cut((1 / 9,) * 3, (1 / 3,) * 3))
    'divided twice'
    >>> find_mistake(Cut((0.25, 0.25), (0.5, 0.5)), Cut((0.25,) * 3, (1 / 3,) * 3))
    'constant'
    """
    if is_close(cut.ratio, 1.0):
        return None
    pairs = enumerate(zip(cut.factors, cut.shares, strict=True))
    missing = [index for index, (factor, share) in pairs if abs(factor) <= _CLOSE * share]
    if missing:
        return "zeroed" if missing == list(range(cut.parts - 1)) and cut.parts > 1 else "left out"
    cuts = [cut] if other is None else [cut, other]
    if all(is_close(one.common, 1.0) or is_close(one.ratio, float(one.parts)) for one in cuts):
        return "undivided"
    if all(is_close(one.common, 1 / one.parts) for one in cuts):
        return "mean of means"
    if all(is_close(one.common, 1 / one.parts**2) or is_close(one.ratio, 1 / one.parts) for one in cuts):
        return "divided twice"
    if other is not None and _is_fixed(cut, other):
        return "constant"
    return "uneven" if cut.ratio is None else "scaled"


def find_loss_scale(cut: Cut, other: Cut | None = None) -> float | None:
    """The loss scale that all parts are left multiplied by: a large power of two, in however many parts.

    >>> find_loss_scale(Cut((16384.0, 16384.0), (0.25, 0.25)), Cut((16384.0, 32768.0), (0.25, 0.5)))
    65536.0
    >>> find_loss_scale(Cut((4.0, 4.0), (0.5, 0.5))) is None
    True
    """
    again = other or cut
    for scale, same in ((cut.ratio, again.ratio), (cut.common, again.common)):
        if scale is not None and scale >= _LEAST_SCALE and is_close(same, scale):
            nearest = 2.0 ** round(math.log2(scale))
            if is_close(nearest, scale):
                return nearest
    return None


def is_close(one: float | None, two: float) -> bool:
    """Whether `one` is `two` but for rounding."""
    return one is not None and abs(one - two) <= _CLOSE * max(abs(one), abs(two))


def _is_fixed(cut: Cut, other: Cut) -> bool:
    """Whether parts are divided by the same number, however many there are."""
    same_factor = cut.common is not None and is_close(other.common, cut.common)
    return same_factor or (cut.ratio is not None and cut.ratio < 1 and is_close(other.ratio, cut.ratio))


def _constant(values: Sequence[float]) -> float | None:
    return values[0] if values and all(is_close(value, values[0]) for value in values) else None
