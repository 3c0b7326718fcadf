from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import TrialState
from small_studies import PureRunner, small_space, small_study

from autoaccum.tuning.events import Noted, TrialEnded, WorkerLost
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.settings import BatchSpan, Setting
from autoaccum.tuning.studies.attributes import DEATHS, MAX_REPEATS
from autoaccum.tuning.studies.heartbeat import Heartbeat, Watch
from autoaccum.tuning.studies.line import Line, count_begun
from autoaccum.tuning.studies.searching import search
from autoaccum.tuning.studies.study import Study
from autoaccum.tuning.studies.workers import Worker

PARAMS = {"learning_rate": 0.5}
SPACE: dict[str, BaseDistribution] = {"learning_rate": FloatDistribution(1e-4, 1.0, log=True)}


@pytest.fixture(params=["db", "journal"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> Study:
    return small_study(tmp_path / f"tune.{request.param}", heartbeat=0.02)


def go_on(study: Study, trials: int) -> list[Any]:
    """Search to the end; what was told."""
    events: list[Any] = []
    search(study, small_space(), PureRunner(), trials=trials, time_limit=None, tell=events.append)
    return events


def begin(line: Line, **attributes: Any) -> optuna.Trial:
    """A trial that runs, by whom `attributes` say."""
    trial = line.take() or line.begin(100)
    assert trial is not None
    trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
    for name, value in {"target_batch": 256, "micro_batch": 8, **attributes}.items():
        trial.set_user_attr(name, value)
    return trial


def dead_worker() -> Worker:
    """A worker of this machine that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    before = Worker.here()
    ended.wait()
    return Worker(before.host, ended.pid, before.machine, 1)


def test_this_process_lives_and_one_that_has_ended_does_not() -> None:
    here = Worker.here()
    assert not here.is_gone()
    assert here.name.endswith(f":{os.getpid()}")
    assert Worker.read(here.to_record()) == here
    assert Worker.read({"host": "x"}) is Worker.read(None) is None
    assert dead_worker().is_gone()
    assert Worker(here.host, here.pid, here.machine, (here.started or 0) + 1).is_gone(), "the number was given again"


def test_of_another_machine_only_the_heartbeat_tells() -> None:
    gone = dead_worker()
    assert not Worker(gone.host, gone.pid, "another start 4026531836", gone.started).is_gone()
    assert not Worker(gone.host, gone.pid, None, None).is_gone()


def test_a_worker_that_is_not_shown_lives_while_its_number_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user sees only their own processes, those of others look like none."""
    here, gone = Worker.here(), dead_worker()

    def hidden(pid: int) -> int:
        raise FileNotFoundError(pid)

    monkeypatch.setattr("autoaccum.tuning.studies.workers._started", hidden)
    assert Worker.here().started is None
    assert not here.is_gone()
    assert gone.is_gone()

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    monkeypatch.setattr(os, "kill", refuse)
    assert not gone.is_gone(), "somebody else's"


def test_a_zombie_is_no_worker() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    here = Worker.here()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Worker(here.host, child.pid, here.machine, here.started).is_gone()
    child.wait()
    child.stdout.close()


def test_a_trial_of_a_dead_worker_is_taken_up_at_once(study: Study) -> None:
    """With the heartbeat of a day, only its process can tell."""
    _, line = study.search_line()
    trial = begin(line, process=dead_worker().to_record(), worker="here:1", heartbeat=1e5, seed=0)
    events = go_on(study, 3)
    assert [event for event in events if isinstance(event, WorkerLost)] == [WorkerLost(0, "here:1")]
    rows = study.rows()
    assert (rows[0].state, rows[0].reason) == ("failed", "its worker here:1 was lost")
    repeated = [row for row in rows if row.repeats == 0]
    assert [row.setting and row.setting.learning_rate for row in repeated] == [trial.params["learning_rate"]]
    assert study.finished == 3


def test_a_worker_elsewhere_is_lost_when_its_heartbeat_stops(study: Study) -> None:
    _, line = study.search_line()
    elsewhere = Worker("elsewhere", 1, "another start", 1)
    begin(line, process=elsewhere.to_record(), worker=elsewhere.name, heartbeat=0.05, seed=0)
    events = go_on(study, 2)
    assert [event for event in events if isinstance(event, WorkerLost)] == [WorkerLost(0, "elsewhere:1")]
    assert [(row.own, row.repeats) for row in study.rows()] == [(False, None), (True, None), (False, 0)]
    assert study.finished == 2


def test_a_heartbeat_that_goes_on_keeps_a_trial(study: Study) -> None:
    """By a clock of our own: what beats is not lost, and what no longer does is."""
    now = [0.0]
    watch = Watch(1.0, clock=lambda: now[0])
    _, line = study.search_line()
    trial = begin(line, process=Worker("elsewhere", 1, "another", 1).to_record(), heartbeat=2.0)
    beats = 0
    for now[0], beating, lost in [(0.0, True, 0), (6.0, True, 0), (11.9, False, 0), (12.1, False, 1)]:
        if beating:
            beats += 1
            trial.set_user_attr("beats", beats)
        assert len(watch.lost(line.trials())) == lost, now
    trial.set_user_attr("beats", 9)
    assert watch.lost(line.trials()) == []


def test_the_heartbeat_beats_and_ends(study: Study) -> None:
    _, line = study.search_line()
    trial = begin(line)
    beaten = threading.Event()

    def beats() -> Any:
        return line.trials()[0].user_attrs.get("beats")

    with Heartbeat(study.storage.backend, trial._trial_id, 0.01):
        while not beats():
            beaten.wait(0.01)
    last = beats()
    beaten.wait(0.05)
    assert beats() == last
    assert threading.active_count() == len([one for one in threading.enumerate() if "heartbeat" not in one.name])


def test_what_kills_its_workers_again_and_again_is_given_up(study: Study) -> None:
    _, line = study.search_line()
    dead = {"process": dead_worker().to_record(), "worker": "here:1", "heartbeat": 1e5, "seed": 0}
    begin(line, **dead)
    for _ in range(MAX_REPEATS):
        line.put_lost_back()
        begin(line, **dead)
    line.put_lost_back()
    assert line.take() is None
    rows = study.rows()
    assert [row.repeats for row in rows] == [None, 0, 1, 2]
    assert {row.state for row in rows} == {"failed"}
    assert rows[-1].reason == "its worker here:1 was lost, the last of 4 that were lost with these parameters"
    assert study.finished == 1
    assert line.trials()[-1].user_attrs[DEATHS] == MAX_REPEATS + 1


def test_what_died_before_it_drew_is_not_taken_up(study: Study) -> None:
    _, line = study.search_line()
    trial = line.begin(100)
    assert trial is not None
    trial.set_user_attr("process", dead_worker().to_record())
    assert [lost.number for lost in line.put_lost_back()] == [0]
    assert (line.take(), study.finished) == (None, 0)


def test_what_died_between_two_of_its_parameters_is_drawn_anew(tmp_path: Path) -> None:
    """So that the study is the one it would have been; what was queued has all of its parameters."""
    spans: dict[str, Any] = {"target_batches": BatchSpan(64, 1024), "coupled": "BatchNorm in module 2"}
    rows: list[Any] = []
    for dies in (False, True):
        study = small_study(tmp_path / f"{dies}.journal", target_batch=spans["target_batches"])
        search(study, small_space(**spans), PureRunner(), trials=3, time_limit=None, tell=lambda event: None)
        if dies:
            _, line = study.search_line()
            trial = line.begin(100)
            assert trial is not None
            trial.set_user_attr("process", dead_worker().to_record())
            trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
        search(study, small_space(**spans), PureRunner(), trials=5, time_limit=None, tell=lambda event: None)
        assert not any(row.repeats is not None for row in study.rows())
        rows.append([(row.setting, row.loss) for row in study.rows() if row.state != "failed"])
    assert rows[0] == rows[1]


def test_an_own_trial_that_died_before_it_was_signed_is_taken_up(study: Study) -> None:
    _, line = study.search_line()
    line.put("own", PARAMS, SPACE, {"own": True})
    trial = line.take()
    assert trial is not None
    trial.set_user_attr("process", dead_worker().to_record())
    go_on(study, 1)
    assert [(row.own, row.repeats, row.state) for row in study.rows()] == [
        (True, None, "failed"),
        (True, 0, "complete"),
    ]


def test_what_another_worker_queues_while_one_begins_is_run(study: Study) -> None:
    """Three workers, four trials: Optuna hands a trial that waits to who asks for a new one, though there are four."""
    _, line = study.search_line()
    trials = [begin(line) for _ in range(3)]
    backend = study.storage.backend
    backend.set_trial_user_attr(trials[1]._trial_id, "lost", "worker")
    backend.set_trial_state_values(trials[1]._trial_id, TrialState.FAIL)
    assert (count_begun(line.trials()), line.take()) == (3, None), "the lost one is to be queued, and counts"
    begin(line)
    line.put_lost_back()
    taken = line.begin(4)
    assert taken is not None
    assert (taken.user_attrs["repeats"], taken.params) == (1, trials[1].params)
    assert count_begun(line.trials()) == 4


def test_what_a_person_queues_while_a_worker_begins_is_run(study: Study) -> None:
    optuna_study, line = study.search_line()
    begin(line)
    optuna_study.enqueue_trial({"learning_rate": 0.025})
    taken = line.begin(1)
    assert taken is not None
    assert taken.suggest_float("learning_rate", 1e-4, 1.0, log=True) == 0.025


def test_a_crash_between_failing_and_queueing_again_loses_nothing(study: Study) -> None:
    optuna_study, line = study.search_line()
    trial = begin(line, lost="worker", worker="here:1")
    optuna_study.tell(trial, state=TrialState.FAIL)
    assert line.put_lost_back() == []
    assert [(one.state, one.params) for one in line.trials()[1:]] == [(TrialState.WAITING, trial.params)]
    line.put_lost_back()
    assert len(line.trials()) == 2


def test_of_two_with_the_same_ticket_the_first_is_run(study: Study) -> None:
    optuna_study, line = study.search_line()
    line.put("own", PARAMS, SPACE, {"own": True})
    line.put("own", PARAMS, SPACE, {"own": True})
    assert len(line.trials()) == 1
    for _ in range(2):
        second = optuna.trial.create_trial(
            state=TrialState.WAITING, params=PARAMS, distributions=SPACE, user_attrs={"ticket": "own", "own": True}
        )
        optuna_study.add_trial(second)
    taken = line.take()
    assert taken is not None
    assert taken.number == 0
    assert (line.take(), [row.number for row in study.rows()]) == (None, [0])


def test_a_waiting_trial_is_taken_by_one_of_many(study: Study) -> None:
    """Eight at once, each with a connection of its own."""
    _, line = study.search_line()
    for number in range(4):
        line.put(f"ticket {number}", PARAMS, SPACE, {})
    taken: list[int] = []
    barrier = threading.Barrier(8)
    others = [small_study(_path(study)) for _ in range(8)]

    def take(other: Study) -> None:
        _, mine = other.search_line()
        barrier.wait()
        while (trial := mine.take()) is not None:
            taken.append(trial.number)

    threads = [threading.Thread(target=take, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [0, 1, 2, 3]


def test_workers_that_begin_at_once_begin_no_more_than_asked(study: Study) -> None:
    """Each has seen that one is lacking; what came too late is dropped before it trains, and is no row."""
    _, line = study.search_line()
    for _ in range(3):
        begin(line)
    assert line.begin(3) is None
    assert line.begin(4) is not None
    assert [row.number for row in study.rows()] == [0, 1, 2, 4]


def test_a_trial_that_a_person_queued_is_run(study: Study) -> None:
    optuna_study, _ = study.search_line()
    optuna_study.enqueue_trial({"learning_rate": 0.025})
    go_on(study, 3)
    rates = [row.setting.learning_rate for row in study.rows() if row.setting is not None]
    assert rates[:2] == [0.025, 0.01]
    assert len(rates) == 3


def _path(study: Study) -> Path:
    return Path(study.storage.shown)


def fail_first(study: Study) -> None:
    """As another worker does that takes the first trial for lost."""
    trial = study.trials(study.name)[0]
    study.storage.backend.set_trial_user_attr(trial._trial_id, "lost", "worker")
    study.storage.backend.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def test_a_trial_that_is_taken_for_lost_in_its_last_moment_is_dropped(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all is written but its state: Optuna says so by another error there."""
    set_constraint = optuna.Trial.set_constraint

    def lose(trial: optuna.Trial, name: str, value: float) -> None:
        set_constraint(trial, name, value)
        if trial.number == 0:
            fail_first(study)

    monkeypatch.setattr(optuna.Trial, "set_constraint", lose)
    events = go_on(study, 2)
    assert [event.text for event in events if isinstance(event, Noted)] == [
        "trial 0 was taken for lost, and is run again: its result is dropped"
    ]
    assert study.finished == 2


def test_a_result_of_a_trial_that_was_taken_for_lost_is_dropped(study: Study) -> None:
    """Its worker was only out of reach: what took it up again is what counts."""

    class Stalled(PureRunner):
        def run(self, setting: Setting, seed: int, goes: Any) -> Outcome:
            outcome = super().run(setting, seed, lambda percent, loss: True)
            if len(self.runs) == 1:
                fail_first(study)
            return outcome

    events: list[Any] = []
    search(study, small_space(), Stalled(), trials=2, time_limit=None, tell=events.append)
    dropped = [event.text for event in events if isinstance(event, Noted)]
    assert dropped == ["trial 0 was taken for lost, and is run again: its result is dropped"]
    assert [(row.state, row.repeats) for row in study.rows()][:2] == [("failed", None), ("complete", 0)]
    assert [event.row.number for event in events if isinstance(event, TrialEnded)] == [1, 2]
    assert study.finished == 2
