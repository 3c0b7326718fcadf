"""Successive halving: at each milestone the better half goes on."""

from __future__ import annotations

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.trial import FrozenTrial

from autoaccum.tuning.runner import MILESTONES
from autoaccum.tuning.studies.attributes import LOST

_SHARE = 2
"""One in so many goes on."""


class Halving(BasePruner):
    """Asynchronous successive halving (Li et al., arXiv 1810.05934) over the milestones of a budget.

    A trial goes on while it is among the better half of all that have come as far, itself included; of less than four
    only the best one is. Optuna's own rule is the same, but counts a lost trial beside the one that takes it up again,
    so that a study that was stopped would end other trials than one that was not. The workload's own setting is what
    the others are compared with, and always goes on.
    """

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether the trial ends at the milestone it has come to."""
        step = trial.last_step
        if step is None or trial.user_attrs.get("own"):
            return False
        losses = sorted(
            other.intermediate_values[step]
            for other in study.get_trials(deepcopy=False)
            if step in other.intermediate_values and LOST not in other.user_attrs and other.number != trial.number
        )
        loss = trial.intermediate_values[step]
        better = sum(1 for other in losses if other < loss)
        return better >= max(1, (len(losses) + 1) // _SHARE)


def make_pruner(kind: str) -> BasePruner:
    """The pruner of that kind: `halving` or `none`."""
    return Halving() if kind == "halving" else NopPruner()


def describe_pruner(kind: str) -> str:
    """A pruner as a phrase."""
    if kind != "halving":
        return "none"
    at = " and ".join(f"{percent} %" for percent in MILESTONES)
    return f"successive halving at {at} of the budget"
