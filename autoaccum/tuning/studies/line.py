"""The line in which trials wait: what was lost is put back, and nothing is run twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autoaccum.tuning.studies.attributes import (
    DEATHS,
    LOST,
    MAX_REPEATS,
    SUPERFLUOUS,
    TICKET,
    is_given_up,
    is_lost,
    is_superfluous,
)
from autoaccum.tuning.studies.heartbeat import Watch
from autoaccum.tuning.studies.parameters import is_drawn

_CARRIED = ("seed", "own", "confirms", "target_batch", "micro_batch")
"""What a trial that takes up another one has of it."""


class Line:
    """The trials of one study that wait.

    Several workers may queue the same trial at the same moment, and no storage offers a lock. So each queued trial has
    a ticket that says what it is for, and of those with the same ticket only the one with the lowest number is run,
    which every worker can see for itself.

    Args:
        study: Optuna's.
        storage: Its storage.
        heartbeat: In seconds.
    """

    def __init__(self, study: optuna.Study, storage: BaseStorage, heartbeat: float) -> None:
        self._study = study
        self._storage = storage
        self._watch = Watch(heartbeat)

    def trials(self) -> list[FrozenTrial]:
        """All trials by now, by number."""
        return self._study.get_trials(deepcopy=False)

    def put(
        self,
        ticket: str,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
    ) -> None:
        """Queue a trial, unless one was queued with that ticket."""
        if ticket in _tickets(self.trials()):
            return
        self._study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=dict(params),
                distributions=dict(distributions),
                user_attrs={**attributes, TICKET: ticket},
            )
        )

    def take(self, wanted: Callable[[FrozenTrial], bool] = lambda trial: True) -> Trial | None:
        """The first waiting trial that is wanted, running from now on; None where none is."""
        for trial in self.trials():
            if trial.state == TrialState.WAITING and wanted(trial) and self._claim(trial):
                return Trial(self._study, trial._trial_id)
        return None

    def begin(self, limit: int) -> Trial | None:
        """A new trial; None where, with those begun by others at the same moment, there are more than `limit`.

        What another worker has queued in this very moment is run instead of a new one. It was counted where it was
        queued, and would be lost for good if it were dropped here: nothing is queued twice.
        """
        trial = self._study.ask()
        known = self.trials()
        late = count_begun([other for other in known if other.number < trial.number]) >= limit
        if (late and not _was_queued(known[trial.number])) or self._is_second(trial._trial_id):
            self._drop(trial._trial_id)
            return None
        return trial

    def put_lost_back(self) -> list[FrozenTrial]:
        """Fail what nobody runs any more, and queue its parameters again; returns what was failed now."""
        failed = [trial for trial in self._watch.lost(self.trials()) if self._fail(trial)]
        for trial in self.trials():
            if (
                trial.state == TrialState.FAIL
                and LOST in trial.user_attrs
                and is_drawn(trial)
                and not is_given_up(trial)
            ):
                self._put_again(trial)
        return failed

    def give_back(self, trial_id: int, reason: str) -> None:
        """Fail a trial of this very worker, and queue its parameters again."""
        try:
            self._storage.set_trial_user_attr(trial_id, "reason", reason)
            self._storage.set_trial_user_attr(trial_id, LOST, "trial")
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return
        trial = self._storage.get_trial(trial_id)
        if is_drawn(trial):
            self._put_again(trial)

    def _fail(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker", "unknown")
        deaths = int(trial.user_attrs.get(DEATHS, 0)) + 1
        try:
            self._storage.set_trial_user_attr(trial._trial_id, "reason", _reason(worker, deaths))
            self._storage.set_trial_user_attr(trial._trial_id, DEATHS, deaths)
            self._storage.set_trial_user_attr(trial._trial_id, LOST, "worker")
            return self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False

    def _put_again(self, trial: FrozenTrial) -> None:
        kept = {name: trial.user_attrs[name] for name in (*_CARRIED, DEATHS) if name in trial.user_attrs}
        self.put(f"repeats {trial.number}", trial.params, trial.distributions, {**kept, "repeats": trial.number})

    def _claim(self, trial: FrozenTrial) -> bool:
        """Whether this worker is the one to run it."""
        if self._is_second(trial._trial_id):
            self._drop(trial._trial_id)
            return False
        try:
            return self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return False

    def _is_second(self, trial_id: int) -> bool:
        trial = self._storage.get_trial(trial_id)
        ticket = trial.user_attrs.get(TICKET)
        return ticket is not None and _tickets(self.trials())[ticket] != trial.number

    def _drop(self, trial_id: int) -> None:
        try:
            self._storage.set_trial_user_attr(trial_id, SUPERFLUOUS, True)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return


def count_begun(trials: Sequence[FrozenTrial]) -> int:
    """How many of them count, or will: finished, running, waiting, or lost and still to be queued again."""
    tickets = _tickets(trials)
    return sum(1 for trial in trials if _counts(trial, tickets))


def _counts(trial: FrozenTrial, tickets: Mapping[str, int]) -> bool:
    if is_superfluous(trial):
        return False
    if trial.state == TrialState.WAITING:
        return tickets.get(trial.user_attrs.get(TICKET, ""), trial.number) == trial.number
    if is_lost(trial):
        return is_drawn(trial) and f"repeats {trial.number}" not in tickets
    return True


def _was_queued(trial: FrozenTrial) -> bool:
    """Whether it waited before it was begun; `fixed_params` is what Optuna notes of one that a person has queued."""
    return TICKET in trial.user_attrs or "fixed_params" in trial.system_attrs


def _reason(worker: object, deaths: int) -> str:
    again = f", the last of {deaths} that were lost with these parameters" if deaths > MAX_REPEATS else ""
    return f"its worker {worker} was lost{again}"


def _tickets(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    """The number of the first trial with each ticket."""
    found: dict[str, int] = {}
    for trial in trials:
        ticket = trial.user_attrs.get(TICKET)
        if isinstance(ticket, str):
            found.setdefault(ticket, trial.number)
    return found
