"""Whether the micro-batch changes the training, as the plan knows it."""

from __future__ import annotations

from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.words import modules
from autoaccum.planning.records import Plan
from autoaccum.tuning.facts import Facts

_BATCHNORM = "BatchNorm normalises by the micro-batch"
"""How the planner's warning of BatchNorms begins (`accumulation.batchnorm`)."""

_OTHERS = "for a sample depends on the others of its micro-batch"
"""What the planner's warning of other modules says (`accumulation.company.findings`)."""

_AS_EXACT = "trials take it that the micro-batch changes speed and memory only"
_TELLS = "`autoaccum verify` tells"


def find_coupling(plan: Plan, facts: Facts) -> tuple[str | None, tuple[str, ...]]:
    """Why the micro-batch changes the training, as a clause, and sentences on what could not be told.

    None for the clause: accumulation is exact, as far as was looked.
    """
    normed = facts.batchnorm != "frozen" and any(said.startswith(_BATCHNORM) for said in plan.warnings)
    found = plan.coupling
    if found is None:
        note = f"whether samples are coupled was not looked at when it was planned: {_AS_EXACT}; {_TELLS}"
        return (_BATCHNORM, ()) if normed else (None, (note,))
    reasons = [
        *_module_reasons(found, plan, normed),
        *(["the loss mixes the samples of a batch"] if found.loss else []),
    ]
    if reasons:
        return " and ".join(reasons), ()
    return None, _doubts(found)


def _module_reasons(found: Coupling, plan: Plan, normed: bool) -> list[str]:
    """What modules do: BatchNorms by their kind, where the plan warns of them and of nothing else."""
    if not found.modules:
        return [_BATCHNORM] if normed else []
    named = modules(found.modules)
    if normed and not any(_OTHERS in said for said in plan.warnings):
        return [f"BatchNorm in {named} normalises by the micro-batch"]
    gives = "give" if len(found.modules) > 1 else "gives"
    return [f"what {named} {gives} for a sample depends on the others of its micro-batch"]


def _doubts(found: Coupling) -> tuple[str, ...]:
    """What the experiment left open."""
    if found.reason is not None:
        return (f"whether samples are coupled could not be told ({found.reason}): {_AS_EXACT}; {_TELLS}",)
    if found.loss is None:
        return (f"whether the loss mixes the samples of a batch could not be told: {_AS_EXACT}; {_TELLS}",)
    return ()
