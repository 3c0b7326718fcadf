"""Workers in processes of their own, some of which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from small_studies import PureRunner, small_space, small_study

from autoaccum.tuning.records import Row
from autoaccum.tuning.studies.searching import search

ROOT = Path(__file__).parents[3]
TRIALS = 10
SECONDS = 0.2
"""Of a trial."""


@contextmanager
def worker(storage: Path, log: Path, seconds: float = SECONDS) -> Iterator[subprocess.Popen[str]]:
    """A process that searches, with trials of so many seconds; gone at the end."""
    code = f"from small_studies import run_worker; run_worker({str(storage)!r}, {str(log)!r}, {TRIALS}, {seconds}, 0.5)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/shared")])}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=240)
    assert (process.returncode, said) == (0, "")


def notes(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for_runs(log: Path, count: int, pid: int | None = None) -> None:
    """Until so many trainings were begun, by that process."""
    deadline = time.monotonic() + 120
    while sum(note["percent"] == 0 and pid in (None, note["pid"]) for note in notes(log)) < count:
        assert time.monotonic() < deadline, notes(log)
        time.sleep(0.01)


def check_all_accounted(rows: tuple[Row, ...], log: Path) -> None:
    """Every trial is finished, or lost and taken up again; and none that is finished was run twice."""
    assert [row.number for row in rows] == list(range(len(rows)))
    lost = {row.number for row in rows if row.state == "failed"}
    assert {row.repeats for row in rows} - {None} <= lost
    kept = [row for row in rows if row.number not in lost]
    assert {row.state for row in kept} <= {"complete", "pruned", "diverged"}
    assert len(kept) == TRIALS
    rates = Counter(row.setting.learning_rate for row in kept if row.setting is not None)
    assert set(rates.values()) == {1}
    assert sum(row.own for row in kept) == 1
    begun = Counter(note["rate"] for note in notes(log) if note["percent"] == 0)
    attempts = Counter(row.setting.learning_rate for row in rows if row.setting is not None)
    assert all(begun[rate] <= attempts[rate] for rate in begun)


def finished(rows: tuple[Row, ...]) -> list[Any]:
    return [(row.state, row.setting, row.loss, row.losses) for row in rows if row.state != "failed"]


@pytest.fixture(params=["db", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"tune.{request.param}"


def test_two_workers_of_which_one_is_killed(storage: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with worker(storage, log, seconds=600) as first, worker(storage, log) as second:
        wait_for_runs(log, 1, first.pid)
        first.send_signal(signal.SIGKILL)
        first.wait()
        finish(second)
    rows = small_study(storage).rows()
    check_all_accounted(rows, log)
    assert {row.worker for row in rows if row.state != "failed"} >= {f"{os.uname().nodename}:{second.pid}"}
    lost = [row for row in rows if row.state == "failed"]
    assert [row.reason for row in lost] == [f"its worker {os.uname().nodename}:{first.pid} was lost"]
    assert [row.repeats for row in rows if row.repeats is not None] == [lost[0].number]


def test_a_worker_killed_again_and_again_comes_to_the_same_study(storage: Path, tmp_path: Path) -> None:
    """What is killed and gone on with equals what was left alone, and no finished trial is run again."""
    log = tmp_path / "log"
    for runs in (1, 2, 3):
        before = len([note for note in notes(log) if note["percent"] == 0])
        with worker(storage, log) as killed:
            wait_for_runs(log, before + runs)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
    with worker(storage, log) as last:
        finish(last)
    rows = small_study(storage).rows()
    check_all_accounted(rows, log)
    whole = small_study(tmp_path / "whole.journal")
    search(whole, small_space(), PureRunner(), trials=TRIALS, time_limit=None, tell=lambda event: None)
    assert finished(rows) == finished(whole.rows())


def test_optunas_own_command_reads_the_study(storage: Path) -> None:
    study = small_study(storage)
    search(study, small_space(), PureRunner(), trials=3, time_limit=None, tell=lambda event: None)
    shown = subprocess.run(
        [sys.executable, "-c", "from optuna.cli import main; raise SystemExit(main())"]
        + ["trials", "--storage", study.storage.command_url, "--study-name", "valley", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    trials = json.loads(shown.stdout)
    assert [trial["number"] for trial in trials] == [0, 1, 2]
    assert trials[0]["params"] == {"learning_rate": 0.01}
    assert trials[0]["user_attrs"]["state"] == "complete"
    best = optuna.load_study(study_name="valley", storage=study.storage.backend).best_trial
    assert trials[best.number]["value"] == best.value
