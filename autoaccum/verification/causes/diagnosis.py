"""Why an accumulated update is not the full batch's: what is put out of the way, step by step, until it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.words import ITSELF, listed
from autoaccum.verification.causes.couplings import (
    balancing_cause,
    batchnorm_cause,
    coupling_causes,
    look_for_coupling,
    module_cause,
    statistics_cause,
)
from autoaccum.verification.causes.explanations import explain_parts
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.interventions import Finding, Intervention, find_least, suspect
from autoaccum.verification.causes.loops import Loop
from autoaccum.verification.causes.mixed_terms import explain_mixed_terms
from autoaccum.verification.causes.notes import find_lost
from autoaccum.verification.causes.restlessness import find_restlessness
from autoaccum.verification.causes.states import draw_cause, hook_cause, state_cause
from autoaccum.verification.causes.wholes import explain_whole
from autoaccum.verification.comparing import Tolerances
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import UNCHANGED, Change
from autoaccum.verification.records import Cause, Comparison

_FIRST = "try a smaller model, or one term of the loss at a time, until both are the same"
_COARSE = 1e-2
"""Of rounding: beyond it, as in half precision, any arithmetic seems to fit."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        causes: Why the two updates differ; none where they are equal.
        notes: What is good to know of that, as sentences.
    """

    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()


def find_causes(lab: Laboratory, comparison: Comparison, tolerances: Tolerances) -> Diagnosis:
    """Find out by experiment why `comparison` is not equal.

    What may couple parts (BatchNorm, state, random draws, modules seen to couple samples) is put out of the way, the
    least first; after each, what is left may be arithmetic (`explain_parts`, or for a loop of the user's own `Loop`).
    The first set that makes both updates equal is the cause, and that run its proof.

    In half precision only what makes both equal is told, as arithmetic cannot be: give a laboratory in float64.

    Args:
        lab: Of the batch and the parts that were compared.
        comparison: What came out.
        tolerances: What it was judged by.
    """
    if comparison.equal:
        return Diagnosis(())
    inquiry = Inquiry(lab, comparison, tolerances)
    restless = find_restlessness(inquiry)
    if restless is not None:
        return Diagnosis((restless,))
    return Diagnosis(_search(inquiry))


def _search(inquiry: Inquiry) -> tuple[Cause, ...]:
    differing = set(inquiry.differences(UNCHANGED) or ())
    if differing <= {"update"}:
        lost = _lost_parameters(inquiry)
        if lost:
            return (_lost_cause(lost),)
        return (_unknown(inquiry, "only the update differs, of equal gradients", Coupling()),)
    suspected = suspect(inquiry)
    found = find_least(inquiry, suspected, lambda change: _explain(inquiry, change))
    if found is not None:
        return _causes(inquiry, found)
    coupling = look_for_coupling(inquiry)
    others = tuple(name for name in coupling.modules if name != ITSELF and name not in inquiry.batchnorms)
    if others:
        module = Intervention("coupled model", others)
        found = find_least(inquiry, suspected, lambda change: _explain(inquiry, change), always=module)
        if found is not None:
            return _causes(inquiry, found)
    seen = (*coupling_causes(inquiry, coupling), *_state_seen(inquiry, suspected))
    is_known = bool(inquiry.moved_parameters) or any(cause.kind in ("coupled loss", "coupled model") for cause in seen)
    return seen if is_known else (*seen, *_remaining(inquiry, coupling))


def _lost_parameters(inquiry: Inquiry) -> list[str]:
    pair = inquiry.pair(UNCHANGED) or ()
    return list(dict.fromkeys(name for outcome in pair for name in find_lost(inquiry.lab, outcome)))


def _lost_cause(names: Sequence[str]) -> Cause:
    """An optimizer whose arithmetic fails: not of accumulation."""
    return Cause(
        kind="unknown",
        found=f"gradients are equal, and the optimizer leaves entries of {listed(names)} that are not finite",
        change=(
            "mend the optimizer first: keep parameters in float32, or give it a larger eps (1e-8 is zero in float16,"
            " and Adam divides by it where a gradient is zero)"
        ),
        where=tuple(names),
    )


def _state_seen(inquiry: Inquiry, suspected: Sequence[Intervention]) -> tuple[Cause, ...]:
    """State that changes the accumulated update, where something else does so too, and is not known."""
    moved = inquiry.moved_parameters
    if moved:
        cause = state_cause(inquiry, moved, UNCHANGED)
        return (replace(cause, change="move them once per update, outside of forward"),)
    state = next((one for one in suspected if one.kind == "state"), None)
    if state is None:
        return ()
    kept, fresh = inquiry.pair(UNCHANGED), inquiry.pair(state.added(UNCHANGED))
    if kept is None or fresh is None or inquiry.are_equal(kept[1], fresh[1]):
        return ()
    return (state_cause(inquiry, state.where, UNCHANGED),)


def _explain(inquiry: Inquiry, change: Change) -> tuple[Cause, ...] | None:
    if inquiry.rounding > _COARSE:
        return None
    if inquiry.method == "accumulate":
        return Loop(inquiry, change).explain()
    return explain_parts(inquiry, change)


def _causes(inquiry: Inquiry, found: Finding[tuple[Cause, ...]]) -> tuple[Cause, ...]:
    explained = found.explanation or ()
    proved = all(cause.proved for cause in explained)
    blamed = [one for one in found.interventions if one.kind != "randomness" or inquiry.lab.draws_mix is not False]
    return (*(_cause(inquiry, one, found, proved=proved) for one in blamed), *explained)


def _cause(inquiry: Inquiry, one: Intervention, found: Finding[tuple[Cause, ...]], *, proved: bool) -> Cause:
    if one.kind == "batchnorm":
        alone = len(found.interventions) == 1 and found.explanation is None
        if alone and set(inquiry.differences(UNCHANGED) or ()) == {"buffers"}:
            return statistics_cause(one.where)
        return batchnorm_cause(one.where, proved=proved, alone=alone)
    if one.kind == "coupled model":
        return module_cause(one.where, proved=proved)
    if one.kind == "balancing loss":
        return balancing_cause(one.where, proved=proved)
    if one.kind == "hook":
        return hook_cause(one.where, proved=proved)
    if one.kind == "randomness":
        return draw_cause(one.where, proved=proved)
    without = UNCHANGED
    for other in found.interventions:
        without = without if other == one else other.added(without)
    return replace(state_cause(inquiry, one.where, without), proved=proved)


def _remaining(inquiry: Inquiry, coupling: Coupling) -> tuple[Cause, ...]:
    """What remains where all that couples samples is known: terms that one weight cannot serve, or what is unknown."""
    at_rest = Change(rest=frozenset(inquiry.batchnorms), fresh_state=bool(inquiry.state))
    known = explain_mixed_terms(inquiry, at_rest) if inquiry.method == "accumulator" else None
    if known is None and not coupling.modules and inquiry.rounding <= _COARSE:
        known = explain_whole(inquiry, replace(at_rest, calm=bool(inquiry.lab.draw_sites)))
    return (known or _unknown(inquiry, "nothing that was put out of the way makes both the same", coupling),)


def _unknown(inquiry: Inquiry, why: str, coupling: Coupling) -> Cause:
    """What is honest where no experiment has told the cause."""
    differing = inquiry.differences(UNCHANGED) or {}
    where = tuple(dict.fromkeys(one.where for one in differing.values() if one.where))
    tried = [*(one.kind for one in suspect(inquiry)), "weights"]
    told = f"; tried: {listed(tried)}"
    if coupling.loss is False and not coupling.modules:
        told += "; no module of the model was seen to mix samples, nor what the loss does with its outputs"
    return Cause(
        kind="unknown",
        found=f"{why}{told}" + (f" ({coupling.reason})" if coupling.reason else ""),
        change=f"look at {listed(where)} first: {_FIRST}" if where else _FIRST,
        where=where,
    )
