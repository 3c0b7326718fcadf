"""Trials of Optuna's as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast, get_args

from optuna.trial import FrozenTrial, TrialState

from autoaccum.tuning.records import Ending, Row, State
from autoaccum.tuning.runner import MILESTONES
from autoaccum.tuning.studies.attributes import is_lost, is_superfluous, value_of
from autoaccum.tuning.studies.parameters import setting_of

_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def rows_of(trials: Iterable[FrozenTrial], seed: int) -> tuple[Row, ...]:
    """Rows of all trials but those queued twice.

    Args:
        trials: Of a study.
        seed: Of those that do not tell: they wait, or were lost before they could.
    """
    return tuple(row_of(trial, seed) for trial in trials if not is_superfluous(trial))


def row_of(trial: FrozenTrial, seed: int) -> Row:
    """The row of one trial."""
    state = _state(trial)
    own_seed = value_of(trial, "seed", int)
    return Row(
        number=trial.number,
        state=state,
        setting=setting_of(trial),
        seed=seed if own_seed is None else own_seed,
        loss=trial.value if state == "complete" else None,
        losses=tuple(
            (percent, trial.intermediate_values[percent])
            for percent in MILESTONES
            if percent in trial.intermediate_values
        ),
        samples=value_of(trial, "samples", int) or 0,
        seconds=value_of(trial, "seconds", float),
        shortages=value_of(trial, "shortages", int) or 0,
        repeats=value_of(trial, "repeats", int),
        confirms=value_of(trial, "confirms", int),
        own=bool(value_of(trial, "own", bool)),
        reason=value_of(trial, "reason", str),
        worker=value_of(trial, "worker", str),
        lost=is_lost(trial),
    )


def _state(trial: FrozenTrial) -> State:
    """Divergence and a lack of memory are complete trials for Optuna, with an infinite value."""
    told = trial.user_attrs.get("state")
    if trial.state == TrialState.COMPLETE and told in get_args(Ending):
        return cast(Ending, told)
    return _STATES[trial.state]
