"""The search for causes: ablate one thing after another until the accumulated update is the full batch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Literal, NamedTuple

from autoaccum.accumulation.coupling import WHOLE_MODEL, Coupling, list_names
from autoaccum.accumulation.first_step_checks import load_balancing_factors
from autoaccum.devices.deadline import TimeIsOver
from autoaccum.verification.causes.cause_experiment import Experiment, find_nondeterminism, look_for_coupling
from autoaccum.verification.causes.coupling_causes import (
    batchnorm_cause,
    coupled_cause,
    coupling_causes,
    explain_whole,
    make_cause,
    state_cause,
)
from autoaccum.verification.causes.loop_causes import explain_loop
from autoaccum.verification.causes.weighting_causes import explain_weighting
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_comparison import Tolerances
from autoaccum.verification.update_run import UNCHANGED, Ablation
from autoaccum.verification.verification_result import Cause, Comparison

_FIRST = "try a smaller model, or one term of the loss at a time, until the updates are equal"
_COARSE = 1e-2
"""With more rounding than this, as in half precision, any arithmetic seems to fit."""


class _PossibleCause(NamedTuple):
    """One possible cause, and the modules, attributes or buffers it is in."""

    kind: Literal["batchnorm", "state", "hook", "randomness", "coupled model", "balancing loss", "coupled loss"]
    where: tuple[str, ...] = ()

    def added(self, ablation: Ablation) -> Ablation:
        if self.kind == "state":
            return replace(ablation, fresh_state=True)
        if self.kind == "hook":
            return replace(ablation, without_hooks=True)
        if self.kind == "randomness":
            return replace(ablation, neutral_rng=True)
        if self.kind == "balancing loss":
            return replace(ablation, without_balancing_loss=True)
        if self.kind == "coupled loss":
            return replace(ablation, coupled=True)
        return replace(ablation, eval_modules=ablation.eval_modules | frozenset(self.where))


class _Found(NamedTuple):
    """The first set of candidates that helped; all of them are needed.

    `explained` holds the causes that remain under their ablation; empty where the updates are then equal.
    """

    candidates: tuple[_PossibleCause, ...]
    explained: tuple[Cause, ...] = ()


def find_causes(runs: PairedRuns, comparison: Comparison, tolerances: Tolerances) -> tuple[Cause, ...]:
    """Find out by experiment why `comparison`, made of these runs and with these tolerances, is not equal.

    At the deadline of the runs' fixture the cause is unknown, with what is known by then.

    What may couple parts (BatchNorm, state, random numbers, modules seen to couple samples) is ablated, in the smallest
    sets first. After each ablation, arithmetic may explain the rest (`explain_weighting` or `explain_loop`). The first
    set that makes both updates equal is the cause, and that run is its proof. In half precision arithmetic explains
    nothing, so pass runs in float64.
    """
    if comparison.equal:
        return ()
    experiment = Experiment(runs, comparison, tolerances)
    try:
        return _search(experiment)
    except TimeIsOver:
        seen = () if experiment.coupling is None else coupling_causes(experiment, experiment.coupling)
        return (*seen, _unknown_cause(experiment, None, Coupling()))


def _search(experiment: Experiment) -> tuple[Cause, ...]:
    nondeterminism = find_nondeterminism(experiment)
    if nondeterminism is not None:
        return (nondeterminism,)
    if set(experiment.differences(UNCHANGED) or ()) <= {"update"}:
        return (_unknown_cause(experiment, "only the update differs, with equal gradients", Coupling()),)
    candidates = _find_candidates(experiment)
    found = _find_least(experiment, candidates)
    if found is not None:
        return _cure_loss(experiment, candidates, _causes(experiment, found))
    coupling = look_for_coupling(experiment)
    if experiment.is_coupled:  # The loss is computed of all samples.
        coupling = replace(coupling, loss=False)
    if experiment.is_exact:
        modules = tuple(name for name in coupling.modules if name not in experiment.batchnorms)
        coupling = replace(coupling, modules=modules)
    experiment.coupling = coupling
    others = tuple(name for name in coupling.modules if name != WHOLE_MODEL and name not in experiment.batchnorms)
    found = _find_least(experiment, candidates, _PossibleCause("coupled model", others)) if others else None
    if found is not None:
        return _causes(experiment, found)
    seen = (*coupling_causes(experiment, coupling), *_observed_state(experiment))
    seen = _cure_loss(experiment, candidates, seen)
    if all(cause.proved for cause in seen) and seen:
        return seen
    if experiment.moved_parameters or any(cause.kind in ("coupled loss", "coupled model") for cause in seen):
        return seen
    return (*seen, _remaining_cause(experiment, coupling))


def _cure_loss(
    experiment: Experiment, candidates: Sequence[_PossibleCause], causes: tuple[Cause, ...]
) -> tuple[Cause, ...]:
    """Try what cures a coupled loss among `causes`: one computation of the loss from the outputs of all parts.

    A `loss(model, batch)` is taken apart for it, where it calls the model once (`coupling_cure.take_apart`).
    """
    loss = next((cause for cause in causes if cause.kind == "coupled loss" and not cause.proved), None)
    if loss is None or experiment.method == "accumulate" or experiment.is_coupled:
        return causes
    found = _find_least(experiment, candidates, _PossibleCause("coupled loss", loss.where))
    if found is None:
        return causes
    cured = coupled_cause(experiment, loss)
    others = tuple(one for one in found.candidates if one.kind != "coupled loss")
    return (*_causes(experiment, _Found(others)), cured)


def _find_candidates(experiment: Experiment) -> list[_PossibleCause]:
    runs = experiment.runs
    found = [
        _PossibleCause("batchnorm", experiment.batchnorms if experiment.normalises_by_part else ()),
        _PossibleCause("balancing loss", load_balancing_factors(experiment.model)),
        _PossibleCause("state", experiment.state),
        _PossibleCause("hook", experiment.hooked_parameters),
        _PossibleCause("randomness", runs.rng_sites if runs.mismatch is None else ()),
    ]
    return [one for one in found if one.where]


def _find_least(
    experiment: Experiment, candidates: Sequence[_PossibleCause], always: _PossibleCause | None = None
) -> _Found | None:
    """Find the smallest set whose ablation makes both updates equal, or leaves a difference that arithmetic explains.

    `always` is in every set. Smaller sets come first, so that each member is needed. Equality under a set with one more
    member is tried before arithmetic, since it is cheaper and a difference that arithmetic explains does not vanish
    under more ablations. The exception are neutral random numbers, which come last: they may hide a mean that divides
    by a random count.
    """
    extra = () if always is None else (always,)
    sizes = range(len(candidates) + 1)
    sets = [[_combine((*subset, *extra)) for subset in combinations(candidates, n)] for n in sizes]
    for smaller, larger in zip([[], *sets], [*sets, []], strict=True):
        for chosen, ablation in larger:
            if not ablation.neutral_rng and experiment.is_equal(ablation):
                return _Found(chosen)
            experiment.refuted.extend(one.kind for one in chosen if len(chosen) == 1)
        for chosen, ablation in smaller:
            explained = _explain(experiment, ablation) if experiment.pair(ablation) is not None else None
            if explained is not None:
                return _Found(chosen, explained)
        for chosen, ablation in larger:
            if ablation.neutral_rng and experiment.is_equal(ablation):
                return _Found(chosen)
    return None


def _combine(
    chosen: tuple[_PossibleCause, ...], but: _PossibleCause | None = None
) -> tuple[tuple[_PossibleCause, ...], Ablation]:
    """Return a set of candidates with the ablation of all of them, except `but`."""
    ablation = UNCHANGED
    for one in chosen:
        ablation = ablation if one == but else one.added(ablation)
    return chosen, ablation


def _explain(experiment: Experiment, ablation: Ablation) -> tuple[Cause, ...] | None:
    if experiment.rounding > _COARSE or ablation.coupled or experiment.is_coupled:
        return None
    if experiment.is_exact:  # Parts by themselves add up only where BatchNorm does not join them.
        ablation = replace(ablation, eval_modules=ablation.eval_modules | frozenset(experiment.batchnorms))
    explain = explain_loop if experiment.method == "accumulate" else explain_weighting
    return explain(experiment, ablation)


def _causes(experiment: Experiment, found: _Found) -> tuple[Cause, ...]:
    blamed = [
        one for one in found.candidates if one.kind != "randomness" or experiment.runs.rng_mixes_samples is not False
    ]
    return (*(_cause(experiment, one, found) for one in blamed), *found.explained)


def _cause(experiment: Experiment, one: _PossibleCause, found: _Found) -> Cause:
    proved = all(cause.proved for cause in found.explained)
    if one.kind == "state":
        return replace(state_cause(experiment, one.where, _combine(found.candidates, but=one)[1]), proved=proved)
    if one.kind == "batchnorm":
        alone = len(found.candidates) == 1 and not found.explained
        if alone and set(experiment.differences(UNCHANGED) or ()) == {"buffers"}:
            return replace(make_cause("statistics", one.where, proved=True), mode='batchnorm="running"')
        return batchnorm_cause(experiment, one.where, proved=proved)
    return make_cause("module" if one.kind == "coupled model" else one.kind, one.where, proved=proved)


def _observed_state(experiment: Experiment) -> tuple[Cause, ...]:
    """Return the cause for state that changes the accumulated update next to something unknown."""
    if experiment.moved_parameters:
        cause = state_cause(experiment, experiment.moved_parameters, UNCHANGED)
        return (replace(cause, change="change them once per update, outside of forward"),)
    kept, fresh = experiment.pair(UNCHANGED), experiment.pair(Ablation(fresh_state=True))
    if not experiment.state or kept is None or fresh is None or experiment.are_equal(kept[1], fresh[1]):
        return ()
    return (state_cause(experiment, experiment.state, UNCHANGED),)


def _remaining_cause(experiment: Experiment, coupling: Coupling) -> Cause:
    """Return the cause that remains when all coupling is known: the whole model, or unknown."""
    known = None
    if not experiment.is_coupled and not coupling.modules and experiment.rounding <= _COARSE:
        norms, draws = frozenset(experiment.batchnorms), bool(experiment.runs.rng_sites)
        ablation = Ablation(eval_modules=norms, fresh_state=bool(experiment.state), neutral_rng=draws)
        known = explain_whole(experiment, ablation)
    return known or _unknown_cause(experiment, "no experiment makes both updates equal", coupling)


def _unknown_cause(experiment: Experiment, why: str | None, coupling: Coupling) -> Cause:
    """Return the cause where no experiment has found one: what differs, and what was tried; `why` None: time is up."""
    differing = experiment.differences(UNCHANGED) or {}
    where = tuple(dict.fromkeys(one.where for one in differing.values() if one.where))
    tried = list_names([*(one.kind for one in _find_candidates(experiment)), "weights"])
    found, change = f"{why}; tried: {tried}{f' ({coupling.reason})' if coupling.reason else ''}", _FIRST
    if why is None:
        limit = experiment.runs.fixture.deadline.limit_seconds
        found = f"the search for the cause stopped at the time limit of {limit:g} s; possible causes: {tried}"
        if experiment.refuted:
            found += f"; not the only cause: {list_names(experiment.refuted)}"
        change = f"verify with --target-batch 4 --micro-batch 2, or with a longer --time-limit; or {_FIRST}"
    return Cause(
        kind="unknown",
        found=found,
        change=f"look at {list_names(where)} first: {change}" if where and why else change,
        where=where,
    )
