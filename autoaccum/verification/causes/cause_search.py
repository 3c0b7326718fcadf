"""Why an accumulated update is not the full batch's: what is put out of the way, step by step, until it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, NamedTuple

from autoaccum.accumulation.coupling import WHOLE_MODEL, Coupling, list_names
from autoaccum.accumulation.first_step_checks import load_balancing_factors
from autoaccum.verification.causes.cause_experiment import Experiment, find_nondeterminism, look_for_coupling
from autoaccum.verification.causes.coupling_causes import coupling_causes, explain_whole, make_cause, state_cause
from autoaccum.verification.causes.loop_causes import explain_loop
from autoaccum.verification.causes.weighting_causes import explain_mixed_terms, explain_weighting
from autoaccum.verification.paired_runs import Runs
from autoaccum.verification.update_comparison import Tolerances
from autoaccum.verification.update_run import UNCHANGED, Change
from autoaccum.verification.verification_result import Cause, Comparison

_FIRST = "try a smaller model, or one term of the loss at a time, until both are the same"
_COARSE = 1e-2
"""Of rounding: beyond it, as in half precision, any arithmetic seems to fit."""


class _Suspect(NamedTuple):
    """One thing that may be put out of the way, and the modules, attributes or buffers it lies in."""

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


class _Found(NamedTuple):
    """The first set of suspects that helped, all of which are needed.

    `explained` is what else there is to it; empty where the updates are equal with them out of the way.
    """

    suspects: tuple[_Suspect, ...]
    explained: tuple[Cause, ...] = ()


def find_causes(runs: Runs, comparison: Comparison, tolerances: Tolerances) -> tuple[Cause, ...]:
    """Find out by experiment why `comparison`, of these runs and judged by these tolerances, is not equal.

    What may couple parts (BatchNorm, state, random draws, modules seen to couple samples) is put out of the way, the
    least first; after each, what is left may be arithmetic (`explain_weighting`, or `explain_loop`).
    The first set that makes both updates equal is the cause, and that run its proof. In half precision only what makes
    both equal is told, as arithmetic cannot be: give runs in float64.
    """
    if comparison.equal:
        return ()
    experiment = Experiment(runs, comparison, tolerances)
    restless = find_nondeterminism(experiment)
    if restless is not None:
        return (restless,)
    if set(experiment.differences(UNCHANGED) or ()) <= {"update"}:
        return (_unknown(experiment, "only the update differs, of equal gradients", Coupling()),)
    suspects = _find_suspects(experiment)
    found = _find_least(experiment, suspects)
    if found is not None:
        return _causes(experiment, found)
    coupling = look_for_coupling(experiment)
    others = tuple(name for name in coupling.modules if name != WHOLE_MODEL and name not in experiment.batchnorms)
    found = _find_least(experiment, suspects, _Suspect("coupled model", others)) if others else None
    if found is not None:
        return _causes(experiment, found)
    if coupling.loss and (mixed := _mixed_terms(experiment)) is not None:
        known = coupling_causes(experiment, replace(coupling, loss=False))
        return (
            *known,
            mixed,
            *_state_seen(experiment),
        )  # Two divisors in one loss only look like samples that are mixed.
    seen = (*coupling_causes(experiment, coupling), *_state_seen(experiment))
    if experiment.moved_parameters or any(cause.kind in ("coupled loss", "coupled model") for cause in seen):
        return seen
    return (*seen, _remaining(experiment, coupling))


def _find_suspects(experiment: Experiment) -> list[_Suspect]:
    """What there is to put out of the way, the likeliest first."""
    runs = experiment.runs
    found = [
        _Suspect("batchnorm", experiment.batchnorms),
        _Suspect("balancing loss", load_balancing_factors(experiment.model)),
        _Suspect("state", experiment.state),
        _Suspect("hook", experiment.hooked),
        _Suspect("randomness", runs.draw_sites if runs.mismatch is None else ()),
    ]
    return [one for one in found if one.where]


def _find_least(experiment: Experiment, suspects: Sequence[_Suspect], always: _Suspect | None = None) -> _Found | None:
    """The smallest set without which both updates are equal, or arithmetic explains why not; None where there is none.

    `always` is in all sets. Smaller ones are tried first, so that each member is needed. Of one size, explanations come
    after equality under one member more, which costs less to ask: what is explained is not equal with more out of the
    way. Only draws that do nothing may make equal what is explained, as where a mean divides by a count that is drawn.
    """
    extra = () if always is None else (always,)
    sizes = range(len(suspects) + 1)
    sets = [[_joint((*subset, *extra)) for subset in combinations(suspects, n)] for n in sizes]
    for smaller, larger in zip([[], *sets], [*sets, []], strict=True):
        for chosen, change in larger:
            if not change.calm and experiment.is_equal(change):
                return _Found(chosen)
        for chosen, change in smaller:
            explained = _explain(experiment, change) if experiment.pair(change) is not None else None
            if explained is not None:
                return _Found(chosen, explained)
        for chosen, change in larger:
            if change.calm and experiment.is_equal(change):
                return _Found(chosen)
    return None


def _joint(chosen: tuple[_Suspect, ...], but: _Suspect | None = None) -> tuple[tuple[_Suspect, ...], Change]:
    """A set of suspects, and the change that puts all of them (but one) out of the way."""
    change = UNCHANGED
    for one in chosen:
        change = change if one == but else one.added(change)
    return chosen, change


def _explain(experiment: Experiment, change: Change) -> tuple[Cause, ...] | None:
    if experiment.rounding > _COARSE:
        return None
    return (
        explain_loop(experiment, change) if experiment.method == "accumulate" else explain_weighting(experiment, change)
    )


def _causes(experiment: Experiment, found: _Found) -> tuple[Cause, ...]:
    blamed = [
        one for one in found.suspects if one.kind != "randomness" or experiment.runs.rng_mixes_samples is not False
    ]
    return (*(_cause(experiment, one, found) for one in blamed), *found.explained)


def _cause(experiment: Experiment, one: _Suspect, found: _Found) -> Cause:
    proved = all(cause.proved for cause in found.explained)
    if one.kind == "state":
        return replace(state_cause(experiment, one.where, _joint(found.suspects, but=one)[1]), proved=proved)
    alone = one.kind == "batchnorm" and len(found.suspects) == 1 and not found.explained
    if alone and set(experiment.differences(UNCHANGED) or ()) == {"buffers"}:
        return make_cause("statistics", one.where, proved=True)
    return make_cause("module" if one.kind == "coupled model" else one.kind, one.where, proved=proved)


def _state_seen(experiment: Experiment) -> tuple[Cause, ...]:
    """State that changes the accumulated update, where something else does so too, and is not known."""
    if experiment.moved_parameters:
        cause = state_cause(experiment, experiment.moved_parameters, UNCHANGED)
        return (replace(cause, change="move them once per update, outside of forward"),)
    kept, fresh = experiment.pair(UNCHANGED), experiment.pair(Change(fresh_state=True))
    if not experiment.state or kept is None or fresh is None or experiment.are_equal(kept[1], fresh[1]):
        return ()
    return (state_cause(experiment, experiment.state, UNCHANGED),)


def _remaining(experiment: Experiment, coupling: Coupling) -> Cause:
    """What remains where all that couples samples is known: terms that one weight cannot serve, or what is unknown."""
    known = None if coupling.loss else _mixed_terms(experiment)
    if known is None and not coupling.modules and experiment.rounding <= _COARSE:
        known = explain_whole(experiment, replace(_at_rest(experiment), calm=bool(experiment.runs.draw_sites)))
    return known or _unknown(experiment, "nothing that was put out of the way makes both the same", coupling)


def _mixed_terms(experiment: Experiment) -> Cause | None:
    return explain_mixed_terms(experiment, _at_rest(experiment)) if experiment.method == "accumulator" else None


def _at_rest(experiment: Experiment) -> Change:
    return Change(rest=frozenset(experiment.batchnorms), fresh_state=bool(experiment.state))


def _unknown(experiment: Experiment, why: str, coupling: Coupling) -> Cause:
    """What is honest where no experiment has told the cause."""
    differing = experiment.differences(UNCHANGED) or {}
    where = tuple(dict.fromkeys(one.where for one in differing.values() if one.where))
    tried = list_names([*(one.kind for one in _find_suspects(experiment)), "weights"])
    return Cause(
        kind="unknown",
        found=f"{why}; tried: {tried}{f' ({coupling.reason})' if coupling.reason else ''}",
        change=f"look at {list_names(where)} first: {_FIRST}" if where else _FIRST,
        where=where,
    )
