"""Whether the micro-batch changes the training, as the plan and the model tell."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.accumulation.coupling import Coupling, modules
from autoaccum.planning.records import Plan
from autoaccum.tuning.facts import Facts

_AS_EXACT = "trials take it that the micro-batch changes speed and memory only"
_TELLS = "`autoaccum verify` tells"


def find_coupling(plan: Plan, facts: Facts) -> tuple[str | None, tuple[str, ...]]:
    """Why the micro-batch changes the training, as a clause, and sentences on what could not be told.

    A BatchNorm counts wherever the model has one that is not frozen: the plan's experiment, at the weights that
    training begins with, does not see one whose own weights are zeros yet, as residual blocks begin with.

    None for the clause: accumulation is exact, as far as was looked.
    """
    normed = () if facts.batchnorm == "frozen" else facts.batchnorms
    found = plan.coupling or Coupling()
    others = [name for name in found.modules if name not in facts.batchnorms]
    reasons = [
        *([f"BatchNorm in {modules(normed)} normalises by the micro-batch"] if normed else []),
        *([_dependence(others)] if others else []),
        *(["the loss mixes the samples of a batch"] if found.loss else []),
    ]
    return (" and ".join(reasons), ()) if reasons else (None, _doubts(plan.coupling))


def _dependence(names: Sequence[str]) -> str:
    gives = "give" if len(names) > 1 else "gives"
    return f"what {modules(names)} {gives} for a sample depends on the others of its micro-batch"


def _doubts(found: Coupling | None) -> tuple[str, ...]:
    """What was not looked at, or left open by the experiment."""
    if found is None:
        return (f"whether samples are coupled was not looked at when it was planned: {_AS_EXACT}; {_TELLS}",)
    if found.reason is not None:
        return (f"whether samples are coupled could not be told ({found.reason}): {_AS_EXACT}; {_TELLS}",)
    if found.loss is None:
        return (f"whether the loss mixes the samples of a batch could not be told: {_AS_EXACT}; {_TELLS}",)
    return ()
