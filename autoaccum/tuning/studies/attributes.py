"""What autoaccum writes beside a trial's parameters: names of user attributes, which Optuna's dashboard shows."""

from __future__ import annotations

from typing import Any

from optuna.trial import FrozenTrial, TrialState

TERMS = "autoaccum"
MEASURED = "autoaccum_measured"
"""Plan and throughput, in one: what was measured with one plan says nothing of another."""

TICKET = "ticket"
"""What a queued trial is there for; of several with the same, the first is run."""
SUPERFLUOUS = "superfluous"
"""That it had another one's ticket, and was not run."""
LOST = "lost"
"""That its worker ended before it did."""
DEATHS = "deaths"
"""How many workers were lost with these parameters."""
MAX_REPEATS = 3
"""How often parameters are taken up again whose workers are lost, each time."""


def is_superfluous(trial: FrozenTrial) -> bool:
    """Whether it was queued twice, and this is not the one that counts."""
    return bool(trial.user_attrs.get(SUPERFLUOUS))


def is_lost(trial: FrozenTrial) -> bool:
    """Whether its worker ended before it did, and its parameters, if it had any, are for another trial."""
    return trial.state == TrialState.FAIL and LOST in trial.user_attrs and not is_given_up(trial)


def is_given_up(trial: FrozenTrial) -> bool:
    """Whether so many workers died of its parameters that they are not taken up again."""
    return (
        trial.state == TrialState.FAIL
        and LOST in trial.user_attrs
        and int(trial.user_attrs.get(DEATHS, 0)) > MAX_REPEATS
    )


def is_finished(trial: FrozenTrial) -> bool:
    """Whether it counts as one of the trials that were asked for."""
    return trial.state.is_finished() and not is_superfluous(trial) and not is_lost(trial)


def value_of(trial: FrozenTrial, name: str, kind: type[Any]) -> Any:
    """A user attribute of that type; None where there is none."""
    value = trial.user_attrs.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) else None
