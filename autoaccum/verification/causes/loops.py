"""A loop of the user's own: what each of its parts counts for, and which line would be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.decomposition import Decomposition
from autoaccum.verification.causes.detachments import explain_detachment
from autoaccum.verification.causes.factors import find_factors, find_residual, flatten
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.patterns import Cut, Fault, find_scale, is_close, name_fault
from autoaccum.verification.causes.weights import SUM, own_shares, share
from autoaccum.verification.causes.words import numbers
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Change, Outcome
from autoaccum.verification.records import Cause, CauseKind
from autoaccum.workload.candidates import count_candidates

_SHARES = "they count for {factors}, their shares are {shares}"
_FOUND: Mapping[Fault, str] = {
    "zeroed": (
        "only the last part counts: gradients are zeroed between the parts, or backward() is called after the loop, of"
        " the last loss only"
    ),
    "left out": "some parts are left out: " + _SHARES,
    "undivided": "the losses of the parts are added up undivided: " + _SHARES,
    "divided twice": "the losses of the parts are divided twice: " + _SHARES,
    "mean of means": (
        "every part's mean counts for {factors}, though parts divide by different counts: their shares are {shares}"
    ),
    "constant": "the losses are divided by a fixed number, here of {parts} parts: " + _SHARES,
    "scaled": "the parts are wrongly divided: " + _SHARES,
    "uneven": "the parts are wrongly weighted: " + _SHARES,
}
_CHANGES: Mapping[Fault, str] = {
    "zeroed": "call backward() for every part, within the loop, and zero_grad() once, before the first part",
    "left out": "run every part of the window forward and backward",
}
_TERMS = Cause(
    kind="accumulate",
    found=(
        "the terms of the loss divide by different counts, and the loop does not give each its own share, by which the"
        " Accumulator comes to the full batch's gradient"
    ),
    change=(
        "for each term of each part: term * weight(part)[name] / total[name], where total is that of all parts of the"
        " window; then backward() of their sum"
    ),
)

_REGULARISER = Cause(
    kind="regulariser",
    found=(
        "the loop's gradient is the full batch's, and once more for each part but the first a term that is the same for"
        " any batch, as a regulariser is"
    ),
    change=(
        "multiply that term by the share of the part as well, as (loss + term) * count / total, or add it once in a"
        " window"
    ),
    proved=True,
)
_LEAST_SHARE = 1e3
"""How much smaller than the gradient such a term may be: its rounding is that of the gradient."""


class Loop:
    """The loop of a workload, under one change.

    Args:
        inquiry: What came out unequal.
        change: What is otherwise in all runs.
    """

    def __init__(self, inquiry: Inquiry, change: Change) -> None:
        self._inquiry, self._change = inquiry, change

    def explain(self) -> tuple[Cause, ...] | None:
        """What it does to its parts; None where not even the Accumulator comes to the full batch's gradient."""
        lab = self._inquiry.lab
        try:
            parts = Decomposition(lab, self._change, self._inquiry.rounding)
            right = _find_shares(parts)
            shares, counted = right or ((), "")
            cut = self._read(parts, shares) if shares else None
            if cut is None:
                return self._made_otherwise(parts)
            other = self._read_otherwise()
            norm, scale = _round_norm(lab.own(self._change)), find_scale(cut, other)
        except AutoaccumError:
            return None
        fault = name_fault(cut, other)
        if scale is not None:
            return (_scale_cause(scale, cut, None if is_close(cut.ratio, scale) else _right_line(lab, counted)),)
        if norm is not None and (fault in ("constant", "scaled") or cut.shrinks):
            return (_clip_cause(norm, every_part=fault not in ("constant", "scaled")),)
        if fault == "mean of means" and counted == SUM:
            fault = "scaled"
        return None if fault is None else (self._cause(fault, cut, counted),)

    def _made_otherwise(self, parts: Decomposition) -> tuple[Cause, ...] | None:
        """Why its gradient is made of something else, where the Accumulator's is the full batch's."""
        accumulated = flatten(parts.lab.accumulated(self._change).gradients, parts.whole.parameters)
        if find_residual(parts.gradient, [accumulated], (1.0,)) > self._inquiry.rounding:
            return None
        detached = explain_detachment(self._inquiry, self._change)
        if detached is not None:
            return detached
        if self._counts_with_parts(parts):
            return (_REGULARISER,)
        return (self._other_loss(),) if own_shares(parts.lab, list(parts.whole.terms)) else (_TERMS,)

    def _counts_with_parts(self, parts: Decomposition) -> bool:
        """Whether its gradient is the full batch's and, for each part but one, once more what is the same for any."""
        labs = [parts.lab, *(one for one in self._inquiry.cuts if len(one.sizes) != len(parts.lab.sizes))][:2]
        if len(labs) < 2 or min(len(lab.sizes) for lab in labs) < 2:
            return False
        one, other = (
            (flatten(lab.own(self._change).gradients, parts.whole.parameters) - parts.gradient) / (len(lab.sizes) - 1)
            for lab in labs
        )
        return find_residual(one, [other], (1.0,)) <= self._inquiry.rounding * _LEAST_SHARE

    def _read(self, parts: Decomposition, shares: tuple[float, ...]) -> Cut | None:
        """What each part counts for, beside what it should; None where its gradient is made of something else."""
        rounding = self._inquiry.rounding
        own = flatten(parts.lab.own(self._change).gradients, parts.whole.parameters)
        found = find_factors(own, parts.gradients)
        if found is None or found.residual > rounding:
            return None
        return Cut(tuple(0.0 if abs(one) < rounding else one for one in found.values), shares)

    def _read_otherwise(self) -> Cut | None:
        """The same of another number of parts."""
        lab = next((one for one in self._inquiry.cuts if len(one.sizes) != len(self._inquiry.lab.sizes)), None)
        if lab is None:
            return None
        parts = Decomposition(lab, self._change, self._inquiry.rounding)
        right = _find_shares(parts)
        return None if right is None else self._read(parts, right[0])

    def _cause(self, fault: Fault, cut: Cut, counted: str) -> Cause:
        kind: CauseKind = "last window" if fault == "constant" and self._inquiry.window == "last" else "accumulate"
        found = _FOUND[fault].format(factors=numbers(cut.factors), shares=numbers(cut.shares), parts=cut.parts)
        change = _CHANGES.get(fault) or _right_line(self._inquiry.lab, counted)
        return Cause(kind=kind, found=found, change=change, proved=True)

    def _other_loss(self) -> Cause:
        differences = self._inquiry.differences(self._change) or {}
        where = tuple(one.where for name, one in differences.items() if name == "gradients" and one.where)
        return Cause(
            kind="accumulate",
            found="the loop's gradient is made of something else than the gradients of loss(model, part)",
            change="compute the loss of a part in the loop as loss(model, part) does",
            where=where,
        )


def _round_norm(own: Outcome) -> float | None:
    """The norm of a gradient that was clipped; None where it is no number that a person would clip to.

    `clip_grad_norm_` divides by the norm plus 1e-6 (torch/nn/utils/clip_grad.py).
    """
    rows = [gradient.norm() for gradient in own.gradients.values() if gradient is not None]
    norm = float(torch.stack(rows).norm()) if rows else 0.0
    rounded = float(f"{norm:.1g}")
    return rounded if 0 <= rounded - norm <= 1e-4 * rounded else None


def _clip_cause(norm: float, *, every_part: bool) -> Cause:
    shrunk = "every part shrinks what came before it" if every_part else "that of the full batch is not clipped here"
    return Cause(
        kind="accumulate",
        found=f"the loop clips the gradient: its norm is {norm:g}, and {shrunk}",
        change="leave clipping out of accumulate(): clip once per update, after it",
    )


def _scale_cause(scale: float, cut: Cut, line: str | None) -> Cause:
    """A loss scale; `line` where the losses are not divided either."""
    undo = "leave the loss scale out of accumulate(), or undo it at its end, as scaler.unscale_(optimizer) does"
    return Cause(
        kind="accumulate",
        found=(
            f"gradients are left multiplied by {scale:g}, as by a GradScaler:"
            f" {_SHARES.format(factors=numbers(cut.factors), shares=numbers(cut.shares))}"
        ),
        change=undo if line is None else f"{undo}; and {line}",
        proved=True,
    )


def _find_shares(parts: Decomposition) -> tuple[tuple[float, ...], str] | None:
    """What parts should count for, and what is counted, in words or as code; None where no one number is right."""
    lab, objective = parts.lab, parts.lab.objective
    own = own_shares(lab, list(parts.whole.terms))
    if own is not None and parts.gives_gradient(own):
        return own, SUM if objective.reduction == "sum" else objective.source
    return next(((shares, code) for shares, code in _usual_shares(lab) if parts.gives_gradient(shares)), None)


def _usual_shares(lab: Laboratory) -> Iterator[tuple[tuple[float, ...], str]]:
    yield (1.0,) * len(lab.parts), SUM
    for candidate in count_candidates(lab.batch, lab.parts):
        yield share(candidate.counts), candidate.code


def _right_line(lab: Laboratory, counted: str) -> str:
    if counted == SUM:
        return "loss(model, part).backward(), without dividing: the loss is a sum"
    what = f"weight(batch): return {counted}"
    if counted == lab.objective.source:
        what = "weight(part)" if lab.objective.weight_function else f"its {counted.partition(' (')[0]}"
    return (
        f"(loss(model, part) * count / total).backward(), where count is a part's own ({what}), and total that of all"
        " parts of the window"
    )
