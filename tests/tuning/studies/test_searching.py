from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from small_studies import PureRunner, small_space, small_study, valley

from autoaccum.errors import WorkloadError
from autoaccum.tuning.events import Reported, TrialBegan, TrialEnded
from autoaccum.tuning.records import Outcome, Row
from autoaccum.tuning.runner import GoOn
from autoaccum.tuning.settings import BatchSpan, RateSpan, Setting
from autoaccum.tuning.studies.confirming import confirm
from autoaccum.tuning.studies.halving import describe_pruner, make_pruner
from autoaccum.tuning.studies.searching import search
from autoaccum.tuning.studies.study import Study

TRIALS = 24


def run(study: Study, runner: Any = None, *, trials: int = TRIALS, tell: Any = lambda event: None, **space: Any) -> Any:
    """Search in `study`; why it ended."""
    return search(study, small_space(**space), runner or PureRunner(), trials=trials, time_limit=None, tell=tell)


def finished(rows: tuple[Row, ...]) -> list[tuple[Any, ...]]:
    """What the finished trials were and came to; those whose worker was lost are none."""
    kept = [row for row in rows if not (row.state == "failed" and row.reason != "it raised")]
    return [(row.state, row.setting, row.seed, row.loss, row.losses, row.confirms, row.own) for row in kept]


class Events(list[Any]):
    """Keeps the events of a kind."""

    def of(self, kind: type) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "tune.journal"


@pytest.fixture(scope="module")
def events() -> Events:
    return Events()


@pytest.fixture(scope="module")
def whole(path: Path, events: Events) -> Study:
    """A study that nothing has stopped, with confirmations."""
    study = small_study(path)
    assert run(study, tell=events.append) is None
    confirm(study, best_of(study), PureRunner(), seeds=(1, 2), tell=events.append)
    return study


def best_of(study: Study, count: int = 3) -> list[tuple[int, Setting]]:
    complete = [row for row in study.rows() if row.state == "complete" and row.confirms is None]
    best = sorted(complete, key=lambda row: row.loss or 0.0)[:count]
    return [(row.number, row.setting) for row in best if row.setting is not None]


def searched(study: Study) -> tuple[Row, ...]:
    return tuple(row for row in study.rows() if row.confirms is None)


def test_all_trials_are_run_and_each_tells_what_it_was(whole: Study) -> None:
    rows = searched(whole)
    assert [row.number for row in rows] == list(range(TRIALS))
    assert {row.state for row in rows} == {"complete", "pruned", "diverged"}
    for row in rows:
        assert row.setting is not None
        assert (row.setting.target_batch, row.setting.micro_batch, row.seed) == (256, 8, 0)
        assert row.worker is not None
        assert row.seconds is not None
        if row.state == "complete":
            assert row.loss == valley(row.setting, 0)
            assert row.losses == ((25, row.loss + 1 / 25), (50, row.loss + 1 / 50))
        else:
            assert row.loss is None


def test_the_first_trial_is_the_workloads_own_and_runs_to_its_end(whole: Study) -> None:
    own = [row for row in searched(whole) if row.own]
    assert [(row.number, row.state) for row in own] == [(0, "complete")]
    assert own[0].setting == Setting(learning_rate=0.01, target_batch=256, micro_batch=8)


def test_divergence_is_a_finished_trial_with_an_infinite_value(whole: Study, path: Path) -> None:
    diverged = {row.number for row in searched(whole) if row.state == "diverged"}
    trials = optuna.load_study(study_name="valley", storage=whole.storage.backend).trials
    assert diverged
    assert {trial.number for trial in trials if trial.value == math.inf} == diverged
    assert all(trials[number].state == optuna.trial.TrialState.COMPLETE for number in diverged)


def test_halving_leaves_the_better_half_at_each_milestone_and_what_is_slower(whole: Study) -> None:
    """Recomputed from the rows: one worker's trials come in the order of their numbers."""
    seen: dict[int, list[tuple[float, float]]] = {25: [], 50: []}
    ended = 0
    for row in searched(whole):
        assert row.setting is not None
        for percent, loss in row.losses:
            ahead = [rate for other, rate in seen[percent] if other < loss]
            seen[percent].append((loss, row.setting.learning_rate))
            among_the_better = row.own or len(ahead) < max(1, len(seen[percent]) // 2)
            went_on = row.state == "complete" or percent < max(dict(row.losses))
            assert went_on or not among_the_better
            assert among_the_better or not went_on or row.setting.learning_rate < min(ahead)
            ended += not went_on
    assert ended == sum(row.state == "pruned" for row in searched(whole)) > TRIALS / 4


def test_every_beginning_milestone_and_end_is_told(whole: Study, events: Events) -> None:
    rows = whole.rows()
    assert [event.row for event in events.of(TrialEnded)] == list(rows)
    assert [event.setting for event in events.of(TrialBegan)] == [row.setting for row in rows]
    told = [(event.percent, event.loss) for event in events.of(Reported)]
    assert told == [pair for row in rows for pair in row.losses]


def test_confirmations_repeat_the_best_with_other_seeds_once(whole: Study) -> None:
    confirmed = [row for row in whole.rows() if row.confirms is not None]
    wanted = [(number, setting, seed) for number, setting in best_of(whole) for seed in (1, 2)]
    assert [(row.confirms, row.setting, row.seed) for row in confirmed] == wanted
    assert all(row.setting is not None and row.loss == valley(row.setting, row.seed) for row in confirmed)
    again = PureRunner()
    confirm(whole, best_of(whole), again, seeds=(1, 2), tell=lambda event: None)
    assert again.runs == []


def test_optuna_reads_the_study_as_its_own(whole: Study, path: Path) -> None:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.load_study(study_name="valley", storage=storage)
    best = min(row.loss for row in searched(whole) if row.loss is not None)
    assert study.best_value == best
    assert study.best_params == {"learning_rate": best_of(whole)[0][1].learning_rate}
    assert len(study.trials) == TRIALS
    attributes = study.best_trial.user_attrs
    assert attributes.items() >= {"state": "complete", "samples": 1000, "micro_batch": 8, "target_batch": 256}.items()
    assert study.best_trial.constraints == {"memory": 0.0}
    names = {summary.study_name for summary in optuna.get_all_study_summaries(storage)}
    assert names == {"valley", "valley, confirmed"}


def test_the_same_seed_gives_the_same_study_and_another_one_another(whole: Study, tmp_path: Path) -> None:
    same, other = small_study(tmp_path / "same.journal"), small_study(tmp_path / "other.journal", seed=1)
    run(same)
    run(other)
    assert finished(searched(same)) == finished(searched(whole))
    rates = [row.setting.learning_rate for row in searched(other) if row.setting and not row.own]
    assert not set(rates) & {row.setting.learning_rate for row in searched(whole) if row.setting and not row.own}


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_a_study_that_is_stopped_and_gone_on_with_is_the_same(whole: Study, tmp_path: Path, ending: str) -> None:
    """Between trials, and by Ctrl-C within them, at each milestone."""
    stops = [(1, 0), (3, 25), (0, 50), (2, 100)]
    trials = 12 if ending == "db" else TRIALS
    where = tmp_path / f"tune.{ending}"
    run(small_study(where), trials=2)
    for stop, percent in stops:

        def interrupt(run: int, setting: Setting, at: int, stop: int = stop, percent: int = percent) -> None:
            if run >= stop and at == percent:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(small_study(where), PureRunner(interrupt), trials=trials)
    study = small_study(where)
    assert run(study, trials=trials) is None
    assert finished(searched(study)) == finished(searched(whole))[:trials]
    lost = [row for row in study.rows() if row.state == "failed"]
    assert [row.reason for row in lost] == ["interrupted"] * 4
    assert {row.repeats for row in study.rows()} - {None} == {row.number for row in lost}


def test_a_finished_study_is_left_alone(whole: Study, path: Path) -> None:
    before = path.read_bytes()
    idle = PureRunner()
    assert run(small_study(path), idle) is None
    assert idle.runs == []
    assert whole.finished == TRIALS
    added = path.read_bytes()[len(before) :]
    assert b"valley" in added or added == b""
    assert len(optuna.load_study(study_name="valley", storage=whole.storage.backend).trials) == TRIALS


def test_trials_that_fail_end_the_search_and_the_study_stays(tmp_path: Path) -> None:
    class Failing(PureRunner):
        def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
            super().run(setting, seed, lambda percent, loss: True)
            return Outcome(state="failed", reason="it raised", user_traceback="Traceback: it raised")

    study, failing = small_study(tmp_path / "tune.journal"), Failing()
    with pytest.raises(WorkloadError, match="the first trial failed: it raised") as error:
        run(study, failing)
    assert error.value.user_traceback == "Traceback: it raised"
    assert error.value.hint is not None
    assert "begin another study by --study NAME" in error.value.hint
    run(study, trials=5)
    with pytest.raises(WorkloadError, match="each of the last 3 trials failed"):
        run(study, failing, trials=20)
    assert len(failing.runs) == 4
    states = [row.state for row in study.rows()]
    assert states.count("failed") == 4
    assert study.finished == 8
    assert run(study, trials=9) is None


def test_a_trial_that_took_too_long_is_not_the_workloads_files(tmp_path: Path) -> None:
    class Slow(PureRunner):
        def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
            return Outcome(state="failed", reason="it took longer than a trial may (3 s), and was ended")

    with pytest.raises(WorkloadError, match="the first trial failed: it took longer") as error:
        run(small_study(tmp_path / "tune.journal"), Slow())
    assert error.value.hint is not None
    assert error.value.hint.startswith("the study is kept: the same command goes on when the cause is mended")


def test_memory_that_runs_out_is_a_constraint(tmp_path: Path) -> None:
    class Short(PureRunner):
        def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
            outcome = super().run(setting, seed, lambda percent, loss: True)
            if len(self.runs) == 2:
                return Outcome(state="out_of_memory", reason="12 GiB are needed")
            if len(self.runs) == 3:
                return Outcome(state="complete", loss=0.0, shortages=2, samples=1000)
            return outcome

    study = small_study(tmp_path / "tune.journal")
    run(study, Short(), trials=6)
    rows = study.rows()
    assert [rows[1].state, rows[1].loss, rows[2].state, rows[2].loss] == ["out_of_memory", None, "complete", 0.0]
    assert rows[2].shortages == 2
    kept = optuna.load_study(study_name="valley", storage=study.storage.backend)
    assert [trial.constraints["memory"] for trial in kept.trials] == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0]
    assert kept.best_trial.number not in (1, 2)


def test_coupled_micro_batches_and_target_batches_are_searched_jointly(tmp_path: Path) -> None:
    study = small_study(tmp_path / "tune.journal", target_batch=BatchSpan(64, 1024))
    run(study, coupled="BatchNorm in module 2", target_batches=BatchSpan(64, 1024), micro_batch=16, trials=14)
    settings = [row.setting for row in study.rows() if row.setting is not None]
    assert settings[0] == Setting(learning_rate=0.01, target_batch=64, micro_batch=8)
    assert {setting.target_batch for setting in settings} == {64, 128, 256, 512, 1024}
    assert {setting.micro_batch for setting in settings} == {1, 2, 4, 8}
    kept = optuna.load_study(study_name="valley", storage=study.storage.backend)
    assert all(set(trial.params) == {"learning_rate", "target_batch", "micro_batch"} for trial in kept.trials)


@pytest.mark.parametrize(("low", "micro_batches", "own"), [(24, (2, 4, 8, 16, 32, 64, 96), 16), (3, (4, 8), 3)])
def test_the_own_rate_has_a_coupled_micro_batch_that_is_searched(
    tmp_path: Path, low: int, micro_batches: tuple[int, ...], own: int
) -> None:
    """Though the smallest update is smaller than what uncoupled trials run with, and none of the sizes."""
    span = BatchSpan(low, 4 * low)
    study = small_study(tmp_path / "tune.journal", target_batch=span)
    run(study, coupled="BatchNorm", target_batches=span, micro_batches=micro_batches, micro_batch=64, trials=10)
    first = study.rows()[0]
    assert (first.own, first.setting) == (True, Setting(learning_rate=0.01, target_batch=low, micro_batch=own))
    assert study.finished == 10


@pytest.mark.parametrize(
    ("rate", "percent", "ends"),
    [
        (0.01, 25, False),  # Slower, and behind: so it would be on the way to the lower loss.
        (0.01, 50, True),  # At half of the budget, too slow to come as far as the best has.
        (0.03, 50, False),
        (0.0001, 25, True),
        (0.08, 25, True),  # Faster, and behind.
    ],
)
def test_halving_ends_what_is_behind_unless_it_is_slower_and_may_catch_up(
    rate: float, percent: int, ends: bool
) -> None:
    study = optuna.create_study(pruner=make_pruner("halving"), direction="minimize")
    for other in (0.035, 0.037, 0.04):
        trial = begun(study, other)
        trial.report(0.1 + other, percent)
        trial.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    behind = begun(study, rate)
    behind.report(0.5, percent)
    assert behind.should_prune() is ends
    behind.set_user_attr("own", True)
    assert not behind.should_prune()


def test_pruners_are_stated() -> None:
    assert describe_pruner("none") == "none"
    words = "successive halving at 25 % and 50 % of the budget, but for slower rates that may catch up"
    assert describe_pruner("halving") == words


def begun(study: optuna.Study, rate: float) -> optuna.Trial:
    study.enqueue_trial({"learning_rate": rate})
    trial = study.ask({"learning_rate": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True)})
    trial.set_user_attr("target_batch", 256)
    trial.set_user_attr("micro_batch", 8)
    return trial


def test_an_own_rate_outside_of_the_range_is_not_tried(tmp_path: Path) -> None:
    rates = RateSpan(0.1, 1.0)
    study = small_study(tmp_path / "tune.journal", learning_rate=rates, sampler="random", pruner="none")
    run(study, learning_rates=rates, trials=4)
    rows = study.rows()
    assert not any(row.own for row in rows)
    assert all(row.setting is not None and row.setting.learning_rate in rates for row in rows)
    assert "pruned" not in {row.state for row in rows}


def test_a_search_ends_when_its_time_is_over(tmp_path: Path) -> None:
    study = small_study(tmp_path / "tune.journal")
    ended = search(study, small_space(), PureRunner(), trials=5, time_limit=1e-9, tell=lambda event: None)
    assert ended == "its time of 1e-09 s is over"


def test_optuna_is_silent_and_its_verbosity_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    run(small_study(tmp_path / "tune.db"), trials=2)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before
