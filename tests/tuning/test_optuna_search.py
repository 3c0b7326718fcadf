"""Studies with real trainings in this process: searching, pruning, failures and resuming."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import noisy_quadratic as quadratic
import optuna
import pytest
import torch
from factories import make_token_budget
from small_studies import FEATURES, OWN_RATE, Greedy, line_workload, plan_of, request_of, search_in, study_in
from torch import nn

from autoaccum import Workload
from autoaccum.errors import StudyError, UsageError, WorkloadError
from autoaccum.messages import message
from autoaccum.tuning import study as studies
from autoaccum.tuning.study import open_storage
from autoaccum.tuning.trial_processes import Train
from autoaccum.tuning.tuning_records import LearningRateRange, Outcome


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tune {0}.db"


def fails_above(rate: float) -> Any:
    def look(learning_rate: float) -> None:
        if learning_rate > rate:
            raise KeyboardInterrupt

    return look


def test_a_study_tries_the_default_rate_first_and_reports_each_trial(file: Path) -> None:
    events: list[Any] = []
    rows, ended = search_in(file, request_of(), notify=events.append)
    assert (ended, len(rows)) == (None, 6)
    assert rows[0].learning_rate == OWN_RATE
    assert [event for event in events if event.state != "running"] == list(rows)
    assert {row.state for row in rows} <= {"complete", "pruned", "diverged"}
    assert search_in(file, request_of())[0] == rows


def test_one_worker_s_study_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, again = (search_in(tmp_path / name, request_of())[0] for name in ("one.db", "again.db"))
    assert [(row.learning_rate, row.loss, row.losses) for row in one] == [
        (row.learning_rate, row.loss, row.losses) for row in again
    ]
    gone_on = search_in(tmp_path / "one.db", request_of(trials=9))[0]
    assert gone_on[:6] == one
    assert len({row.learning_rate for row in gone_on}) == 9


def test_an_interrupted_trial_does_not_count_and_the_study_resumes(tmp_path: Path) -> None:
    file = tmp_path / "tune.db"
    with pytest.raises(KeyboardInterrupt):
        search_in(file, request_of(), before=fails_above(OWN_RATE * 0.9))
    with study_in(file, request_of()) as study:
        (first,) = study.rows()
    assert (first.state, first.lost) == ("failed", True)
    rows, _ = search_in(file, request_of())
    assert [row.learning_rate == OWN_RATE for row in rows if not row.lost] == [True] + [False] * 5


def test_training_that_diverges_is_a_finished_trial_that_does_not_win(tmp_path: Path) -> None:
    workload = line_workload(model=lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 1)))
    wild: dict[str, Any] = {"rates": LearningRateRange(1e-3, 1e6), "own_rate": 1e5}
    rows, _ = search_in(tmp_path / "tune.db", request_of(), workload=workload, **wild)
    assert (rows[0].state, rows[0].loss) == ("diverged", None)
    assert rows[0].reason is not None
    assert rows[0].reason.code in ("error", "held_out_loss_not_finite")
    assert len(rows) == 6


def test_a_trial_that_runs_out_of_memory_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    built: list[int] = []

    def model() -> nn.Module:
        built.append(len(built))
        return Greedy(0 if built == [0] else 4)

    rows, _ = search_in(tmp_path / "tune.db", request_of(trials=3), workload=line_workload(model=model))
    assert [row.state for row in rows] == ["out_of_memory", "complete", "complete"]
    assert rows[0].loss is None
    assert all(row.oom_retries for row in rows[1:])


def test_pruning_is_optuna_s_successive_halving(tmp_path: Path) -> None:
    rows, _ = search_in(tmp_path / "tune.db", request_of(trials=12))
    pruned = [row for row in rows if row.state == "pruned"]
    assert pruned
    assert all(row.losses[-1][0] in (25, 50) and row.loss is None for row in pruned)


def test_code_that_fails_at_once_ends_the_study_with_its_traceback(tmp_path: Path) -> None:
    def odd(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("odd")

    workload = Workload(model=lambda: nn.Linear(FEATURES, 1), loss=odd, dataset=line_workload().dataset, name="odd")
    with pytest.raises(WorkloadError, match="the first trial failed: .*odd") as caught:
        search_in(tmp_path / "tune.db", request_of(), workload=workload)
    assert "odd" in str(caught.value.user_traceback)


def test_later_failures_are_finished_trials(tmp_path: Path) -> None:
    built: list[int] = []

    def model() -> nn.Module:
        built.append(len(built))
        if len(built) > 1:
            raise ValueError("odd")
        return nn.Linear(FEATURES, 1)

    rows, _ = search_in(tmp_path / "tune.db", request_of(), workload=line_workload(model=model))
    assert [row.state for row in rows] == ["complete"] + ["failed"] * 5
    assert "odd" in str(rows[1].reason)


def test_no_trial_begins_after_the_limit_on_time(tmp_path: Path) -> None:
    rows, ended = search_in(tmp_path / "tune.db", request_of(time_limit=1e-6))
    assert (rows[1:], ended) == ((), message("study_out_of_time", seconds=1e-6))


def test_a_study_with_other_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tune.db"
    rows, _ = search_in(file, request_of(trials=1))
    with pytest.raises(UsageError, match=r"made with other settings \(seed 0, now 1\)"):
        search_in(file, request_of(seed=1))
    assert search_in(file, request_of(trials=1))[0] == rows


def test_a_study_of_somebody_else_is_refused(file: Path) -> None:
    with open_storage(str(file)) as storage:
        optuna.create_study(storage=storage, study_name="line").optimize(lambda trial: 1.0, n_trials=1)
    with pytest.raises(UsageError, match="exists and is not autoaccum's"):
        search_in(file, request_of())


def test_a_file_that_is_not_a_storage_is_unchanged(file: Path) -> None:
    file.write_text("precious\n" * 100)
    with pytest.raises(StudyError, match="cannot be read or written"):
        search_in(file, request_of())
    assert file.read_text() == "precious\n" * 100


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="unable to open database file"):
        search_in(tmp_path / "no" / "tune.db", request_of())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_whose_process_was_killed_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "_HEARTBEAT_SECONDS", 1)
    file = tmp_path / "tune.db"
    with study_in(file, request_of()) as study:
        killed = study.optuna.ask()
        rate = killed.suggest_float("learning_rate", OWN_RATE / 100, OWN_RATE * 100, log=True)
        killed.storage.record_heartbeat(killed._trial_id)  # type: ignore[attr-defined]
    time.sleep(3.5)  # More than two heartbeats, in whole seconds.
    rows, _ = search_in(file, request_of(trials=2))
    assert rows[0].lost
    assert rate in [row.learning_rate for row in rows[1:]]


@pytest.mark.slow
def test_studies_find_the_learning_rate_that_is_known_to_be_best(tmp_path: Path) -> None:
    """Within 10 % of the least expected loss."""
    workload = Workload(
        model=quadratic.model,
        dataset=quadratic.dataset,
        evaluation_dataset=quadratic.evaluation_dataset,
        loss=quadratic.loss,
        optimizer=quadratic.optimizer,
    )
    own, batch = quadratic.OWN_RATE, quadratic.TARGET_BATCH
    searched: dict[str, Any] = {"rates": LearningRateRange(own / 100, own * 100), "own_rate": own}
    searched |= {"plan": plan_of(parts=(batch,)), "budget": quadratic.BUDGET}
    request = request_of(trials=30, seed=0, target_batch=batch)
    rows, _ = search_in(tmp_path / "study.db", request, workload=workload, **searched)
    best = min((row for row in rows if row.state == "complete"), key=lambda row: row.loss)
    expected = quadratic.expected_loss(best.learning_rate)
    assert expected <= 1.1 * quadratic.expected_loss(quadratic.best_rate())


def test_every_trial_has_the_plans_budget_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def train(workload: Workload, training: Train, *_: Any) -> Outcome:
        seen.append(training.micro_tokens)
        return Outcome(state="complete", loss=1.0)

    monkeypatch.setattr("small_studies.train_setting", train)
    plan = dataclasses.replace(plan_of(), tokens=make_token_budget(48))
    search_in(tmp_path / "tune.db", request_of(trials=2), plan=plan)
    assert seen == [48, 48]


@pytest.mark.slow
def test_a_range_of_batches_and_coupled_micro_batches_are_searched_with_the_rate(tmp_path: Path) -> None:
    request = request_of(target_batch=range(8, 33), trials=12)
    assert request.target_batches == (8, 16, 32)
    rows, _ = search_in(tmp_path / "tune.db", request, micro_batches=(2, 4), plan=plan_of(parts=(16, 16)))
    assert (rows[0].learning_rate, rows[0].target_batch, rows[0].micro_batch) == (OWN_RATE, 8, 4)
    assert {row.target_batch for row in rows} > {8}
    assert {row.micro_batch for row in rows} == {2, 4}
    assert all(row.state in ("complete", "pruned", "diverged") for row in rows)
