"""What is told of repetitions names the trials they repeat: their own numbers are those of another study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from small_studies import PureRunner, small_space, small_study

from autoaccum.tuning.events import Noted, WaitingForOthers, WorkerLost
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.runner import GoOn
from autoaccum.tuning.settings import Setting
from autoaccum.tuning.studies.attributes import DEATHS, LOST, MAX_REPEATS
from autoaccum.tuning.studies.confirming import confirm
from autoaccum.tuning.studies.searching import Pause, search
from autoaccum.tuning.studies.study import Study
from autoaccum.tuning.studies.workers import Worker

GONE = {**Worker.here().to_record(), "started": 1}
"""A worker of this machine whose number was given to another process."""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = small_study(tmp_path / "tune.journal", heartbeat=0.02)
    search(study, small_space(), PureRunner(), trials=2, time_limit=None, tell=lambda event: None)
    return study


def interrupt(*given: object) -> None:
    raise KeyboardInterrupt


class Warned(PureRunner):
    """Warns in each run, and is taken for lost in its first one."""

    def __init__(self, study: Study) -> None:
        super().__init__()
        self._study = study

    def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
        outcome = super().run(setting, seed, go_on)
        if len(self.runs) == 1:
            backend = self._study.storage.backend
            trial = self._study.trials(self._study.confirmed_name)[-1]
            backend.set_trial_user_attr(trial._trial_id, LOST, "worker")
            backend.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        return replace(outcome, warnings=("odd",))


def test_a_repetition_is_called_by_the_trial_and_the_seed(study: Study) -> None:
    found = study.rows()[1]
    assert found.setting is not None
    asked = [(found.number, found.setting)]
    with pytest.raises(KeyboardInterrupt):
        confirm(study, asked, PureRunner(interrupt), seeds=(5,), tell=lambda event: None)
    _, line = study.confirmation_line()
    taken = line.take()
    assert taken is not None
    for name, value in {"process": GONE, "worker": "here:1"}.items():
        taken.set_user_attr(name, value)
    told: list[Any] = []
    confirm(study, asked, Warned(study), seeds=(5,), tell=told.append)
    lost = [event for event in told if isinstance(event, WorkerLost)]
    assert lost == [WorkerLost(1, "here:1", confirms=1, seed=5)]
    assert [event.text for event in told if isinstance(event, Noted)] == [
        "the repetition of trial 1 with seed 5 was taken for lost, and is run again: its result is dropped",
        "the repetition of trial 1 with seed 5: odd",
    ]


@pytest.mark.parametrize(("drawn", "deaths"), [(True, MAX_REPEATS), (False, 0)], ids=["given up", "not drawn"])
def test_what_is_not_taken_up_again_is_told_so(study: Study, drawn: bool, deaths: int) -> None:
    _, line = study.search_line()
    trial = line.begin(100)
    assert trial is not None
    if drawn:
        trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
    for name, value in {"process": GONE, "target_batch": 256, "micro_batch": 8, DEATHS: deaths}.items():
        trial.set_user_attr(name, value)
    told: list[Any] = []
    search(study, small_space(), PureRunner(), trials=3, time_limit=None, tell=told.append)
    lost = [event for event in told if isinstance(event, WorkerLost)]
    assert lost == [WorkerLost(2, "unknown", again=False)]


def running(number: int, **attributes: int) -> FrozenTrial:
    trial = create_trial(state=TrialState.RUNNING, user_attrs=attributes)
    trial.number = number
    return trial


def test_others_are_waited_for_where_there_are_any_and_that_is_said_once(study: Study) -> None:
    told: list[Any] = []
    pause = Pause(study, told.append)
    pause.wait([])
    assert told == []
    pause.wait([running(4), running(6)])
    pause.wait([running(6)])
    assert told == [WaitingForOthers((4, 6))]
    Pause(study, told.append).wait([running(0, confirms=8), running(3, confirms=8), running(2, confirms=7)])
    assert told[1:] == [WaitingForOthers((0, 3, 2), (7, 8))]
