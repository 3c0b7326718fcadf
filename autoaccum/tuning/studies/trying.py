"""One trial: run, looked at on its way, and kept; or put back where its worker is interrupted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from autoaccum.errors import StudyError
from autoaccum.tuning.events import Listener, Noted, Reported, TrialBegan, TrialEnded, name_run
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.runner import END, Runner
from autoaccum.tuning.settings import Setting
from autoaccum.tuning.studies.heartbeat import Heartbeat
from autoaccum.tuning.studies.line import Line
from autoaccum.tuning.studies.parameters import MICRO, TARGET
from autoaccum.tuning.studies.rows import row_of
from autoaccum.tuning.studies.study import Study
from autoaccum.tuning.studies.workers import Worker

_CONSTRAINT = "memory"


@dataclass(frozen=True)
class Trying:
    """Runs trials of a study, one after the other.

    Args:
        study: The study.
        line: Where an interrupted trial is put back.
        runner: Who trains.
        tell: Told how it goes.
    """

    study: Study
    line: Line
    runner: Runner
    tell: Listener

    def run(self, trial: Trial, draw: Callable[[Trial], Setting], seed: int) -> Outcome | None:
        """Run one trial to its end; None where it was taken for lost meanwhile, and is run by somebody else.

        Args:
            trial: Running, by this worker.
            draw: Gives its setting.
            seed: To train with.

        Raises:
            StudyError: The storage cannot be read or written any more.
            KeyboardInterrupt: It was interrupted, and put back.
        """
        try:
            with self.study.reaching():
                self._sign(trial, seed)
                setting = draw(trial)
                _note(trial, {TARGET: setting.target_batch, MICRO: setting.micro_batch})
            self._tell_beginning(trial, setting, seed)
            with Heartbeat(self.study.storage.backend, trial._trial_id, self.study.storage.heartbeat):
                outcome = self.runner.run(setting, seed, lambda percent, loss: self._goes_on(trial, percent, loss))
            with self.study.reaching():
                _keep(trial, outcome)
        except UpdateFinishedTrialError:
            self.tell(Noted(f"{_name(trial, seed)} was taken for lost, and is run again: its result is dropped"))
            return None
        except BaseException as error:
            with suppress(StudyError), self.study.reaching():
                self.line.give_back(trial._trial_id, _interruption(error))
            raise
        self._tell_end(trial, seed, outcome)
        return outcome

    def _sign(self, trial: Trial, seed: int) -> None:
        """Say who runs it, before anything else: should that worker die, others know at once."""
        worker = Worker.here()
        heartbeat = self.study.storage.heartbeat
        _note(trial, {"process": worker.to_record(), "worker": worker.name, "heartbeat": heartbeat, "seed": seed})

    def _tell_beginning(self, trial: Trial, setting: Setting, seed: int) -> None:
        attributes = trial.user_attrs
        self.tell(
            TrialBegan(
                trial.number,
                setting,
                seed,
                confirms=attributes.get("confirms"),
                repeats=attributes.get("repeats"),
                own=bool(attributes.get("own")),
            )
        )

    def _goes_on(self, trial: Trial, percent: int, loss: float) -> bool:
        """Keep a loss on the way; whether the trial is worth its rest. One that is not finite is for the runner."""
        self.tell(Reported(trial.number, percent, loss))
        if not math.isfinite(loss):
            return True
        with self.study.reaching():
            trial.report(loss, percent)
            return not trial.should_prune()

    def _tell_end(self, trial: Trial, seed: int, outcome: Outcome) -> None:
        for text in outcome.warnings:
            self.tell(Noted(f"{_name(trial, seed)}: {text}"))
        with self.study.reaching():
            kept = self.study.storage.backend.get_trial(trial._trial_id)
        self.tell(TrialEnded(row_of(kept, seed)))


def _name(trial: Trial, seed: int) -> str:
    return name_run(trial.number, trial.user_attrs.get("confirms"), seed)


def _note(trial: Trial, attributes: Mapping[str, Any]) -> None:
    known = trial.user_attrs
    for name, value in attributes.items():
        if known.get(name) != value:
            trial.set_user_attr(name, value)


def _keep(trial: Trial, outcome: Outcome) -> None:
    """Write down what a trial came to: its state last, so that a trial which is finished is whole."""
    told: dict[str, Any] = {
        "state": outcome.state,
        "samples": outcome.samples,
        "updates": outcome.updates,
        "seconds": outcome.seconds,
        "shortages": outcome.shortages,
        "reason": outcome.reason,
        "traceback": outcome.user_traceback,
        "warnings": list(outcome.warnings),
    }
    _note(trial, {name: value for name, value in told.items() if value is not None and value != []})
    lacking = outcome.shortages or int(outcome.state == "out_of_memory")
    trial.set_constraint(_CONSTRAINT, float(lacking))
    if outcome.state == "failed":
        _tell(trial, TrialState.FAIL)
    elif outcome.state == "pruned":
        _tell(trial, TrialState.PRUNED)
    else:
        loss = outcome.loss if outcome.state == "complete" and outcome.loss is not None else math.inf
        if math.isfinite(loss):
            trial.report(loss, END)
        _tell(trial, TrialState.COMPLETE, loss)


def _tell(trial: Trial, state: TrialState, loss: float | None = None) -> None:
    """End a trial.

    Raises:
        UpdateFinishedTrialError: Somebody else has; Optuna says so where it writes, but not where it looks before that.
    """
    try:
        trial.study.tell(trial, loss, state)
    except ValueError as error:
        if trial.study._storage.get_trial(trial._trial_id).state.is_finished():
            raise UpdateFinishedTrialError(str(error)) from None
        raise


def _interruption(error: BaseException) -> str:
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else f"{type(error).__name__}: {error}"
