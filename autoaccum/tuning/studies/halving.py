"""Successive halving: at each milestone the better half goes on."""

from __future__ import annotations

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.trial import FrozenTrial

from autoaccum.tuning.judging.catching_up import may_catch_up
from autoaccum.tuning.runner import MILESTONES
from autoaccum.tuning.studies.attributes import LOST
from autoaccum.tuning.studies.parameters import setting_of

_SHARE = 2
"""One in so many goes on."""


class Halving(BasePruner):
    """Asynchronous successive halving (Li et al., arXiv 1810.05934) over the milestones of a budget.

    A trial goes on while it is among the better half of all that have come as far, itself included; of less than four
    only the best one is. Optuna's own rule is the same, but counts a lost trial beside the one that takes it up again,
    so that a study that was stopped would end other trials than one that was not. The workload's own setting is what
    the others are compared with, and always goes on. So does a trial that is behind as slower rates are before they
    are ahead (`judging.catching_up`): without that, a study finds the best rate for a quarter of the budget.
    """

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether the trial ends at the milestone it has come to."""
        step = trial.last_step
        if step is None or trial.user_attrs.get("own"):
            return False
        others = [
            other
            for other in study.get_trials(deepcopy=False)
            if step in other.intermediate_values and LOST not in other.user_attrs and other.number != trial.number
        ]
        loss = trial.intermediate_values[step]
        ahead = [other for other in others if other.intermediate_values[step] < loss]
        return len(ahead) >= max(1, (len(others) + 1) // _SHARE) and not _may_catch_up(trial, ahead, step)


def _may_catch_up(trial: FrozenTrial, ahead: list[FrozenTrial], step: int) -> bool:
    """Whether a trial that is behind may yet win."""
    own, best = setting_of(trial), setting_of(min(ahead, key=lambda other: other.intermediate_values[step]))
    settings = [setting for other in ahead if (setting := setting_of(other)) is not None]
    return own is not None and best is not None and may_catch_up(own, best, settings, step)


def make_pruner(kind: str) -> BasePruner:
    """The pruner of that kind: `halving` or `none`."""
    return Halving() if kind == "halving" else NopPruner()


def describe_pruner(kind: str) -> str:
    """A pruner as a phrase."""
    if kind != "halving":
        return "none"
    at = " and ".join(f"{percent} %" for percent in MILESTONES)
    return f"successive halving at {at} of the budget, but for slower rates that may catch up"
