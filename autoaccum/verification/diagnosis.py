"""Why an accumulated update is not the full batch's: what is put out of the way, step by step, until it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import Generic, Literal, TypeVar

from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.words import ITSELF, listed
from autoaccum.accumulation.routers import balancing_factors
from autoaccum.verification.comparing import Tolerances
from autoaccum.verification.coupling_causes import (
    balancing_cause,
    batchnorm_cause,
    coupling_causes,
    draw_cause,
    explain_whole,
    hook_cause,
    look_for_coupling,
    module_cause,
    state_cause,
    statistics_cause,
)
from autoaccum.verification.inquiry import Inquiry, find_lost, find_restlessness
from autoaccum.verification.loops import Loop
from autoaccum.verification.parts import explain_mixed_terms, explain_parts
from autoaccum.verification.records import Cause, Comparison
from autoaccum.verification.runs import Runs
from autoaccum.verification.updates import UNCHANGED, Change

_FIRST = "try a smaller model, or one term of the loss at a time, until both are the same"
_COARSE = 1e-2
"""Of rounding: beyond it, as in half precision, any arithmetic seems to fit."""


def find_causes(runs: Runs, comparison: Comparison, tolerances: Tolerances) -> tuple[Cause, ...]:
    """Find out by experiment why `comparison` is not equal.

    What may couple parts (BatchNorm, state, random draws, modules seen to couple samples) is put out of the way, the
    least first; after each, what is left may be arithmetic (`explain_parts`, or for a loop of the user's own `Loop`).
    The first set that makes both updates equal is the cause, and that run its proof.

    In half precision only what makes both equal is told, as arithmetic cannot be: give runs in float64.

    Args:
        runs: Of the batch and the parts that were compared.
        comparison: What came out.
        tolerances: What it was judged by.
    """
    if comparison.equal:
        return ()
    inquiry = Inquiry(runs, comparison, tolerances)
    restless = find_restlessness(inquiry)
    return _search(inquiry) if restless is None else (restless,)


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
    return list(dict.fromkeys(name for outcome in pair for name in find_lost(inquiry.runs, outcome)))


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
    blamed = [one for one in found.interventions if one.kind != "randomness" or inquiry.runs.draws_mix is not False]
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
        known = explain_whole(inquiry, replace(at_rest, calm=bool(inquiry.runs.draw_sites)))
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


Explanation = TypeVar("Explanation")


@dataclass(frozen=True)
class Intervention:
    """One thing that may be put out of the way.

    Attributes:
        kind: What is suspected.
        where: Modules, attributes or buffers it lies in.
    """

    kind: Literal["batchnorm", "state", "hook", "randomness", "coupled model", "balancing loss"]
    where: tuple[str, ...] = ()

    def added(self, change: Change) -> Change:
        """`change`, with this out of the way as well."""
        if self.kind == "state":
            return replace(change, fresh_state=True)
        if self.kind == "hook":
            return replace(change, unhooked=True)
        if self.kind == "randomness":
            return replace(change, calm=True)
        if self.kind == "balancing loss":
            return replace(change, unbalanced=True)
        return replace(change, rest=change.rest | frozenset(self.where))


@dataclass(frozen=True)
class Finding(Generic[Explanation]):
    """The first set of interventions that helped.

    Attributes:
        interventions: All of them are needed.
        change: All of them together.
        explanation: What else there is to it; None where the updates are equal with them.
    """

    interventions: tuple[Intervention, ...]
    change: Change
    explanation: Explanation | None


def suspect(inquiry: Inquiry) -> list[Intervention]:
    """What there is to put out of the way, the likeliest first."""
    found = [Intervention("batchnorm", inquiry.batchnorms)] if inquiry.batchnorms else []
    if factors := balancing_factors(inquiry.model):
        found.append(Intervention("balancing loss", factors))
    if inquiry.state:
        found.append(Intervention("state", inquiry.state))
    if inquiry.hooked:
        found.append(Intervention("hook", inquiry.hooked))
    if inquiry.runs.mismatch is None and inquiry.runs.draw_sites:
        found.append(Intervention("randomness", inquiry.runs.draw_sites))
    return found


def find_least(
    inquiry: Inquiry,
    suspected: Sequence[Intervention],
    explain: Callable[[Change], Explanation | None],
    always: Intervention | None = None,
) -> Finding[Explanation] | None:
    """The smallest set after which both updates are equal, or `explain` knows why not; None where there is none.

    Smaller sets are tried first, so that each member of the set is needed. Of one size, explanations come after
    equality under one member more, which costs less to ask: what is explained is not equal with more out of the way.
    Only draws that do nothing may make equal what is explained, as where a mean divides by a count that is drawn.

    Args:
        inquiry: What came out unequal.
        suspected: What may be put out of the way.
        explain: Why the updates differ under a change; None where it does not know.
        always: What is in all sets.
    """
    sets = [[_joint(subset, always) for subset in combinations(suspected, n)] for n in range(len(suspected) + 1)]
    for smaller, larger in zip([[], *sets], [*sets, []], strict=True):
        calm = [one for one in larger if one[1].calm]
        for chosen, change in larger:
            if not change.calm and inquiry.is_equal(change):
                return Finding(chosen, change, None)
        for chosen, change in smaller:
            explanation = explain(change) if inquiry.pair(change) is not None else None
            if explanation is not None:
                return Finding(chosen, change, explanation)
        for chosen, change in calm:
            if inquiry.is_equal(change):
                return Finding(chosen, change, None)
    return None


def _joint(subset: Sequence[Intervention], always: Intervention | None) -> tuple[tuple[Intervention, ...], Change]:
    """A set of interventions, and the change that is all of them."""
    chosen = tuple(subset) if always is None else (*subset, always)
    return chosen, reduce(lambda change, one: one.added(change), chosen, UNCHANGED)
