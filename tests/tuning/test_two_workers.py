"""Two workers by the command on one study, one of which is killed in the middle of a trial."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest

from autoaccum.tuning.records import Row
from autoaccum.tuning.studies.rows import rows_of
from autoaccum.tuning.studies.storage import Storage, open_storage

ROOT = Path(__file__).parents[2]
TRIALS = 5
LINE = """
import os, time
import torch
from torch import nn
drawn = torch.Generator().manual_seed(0)
inputs = torch.randn(400, 4, generator=drawn)
targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
dataset = torch.utils.data.TensorDataset(inputs[:320], targets[:320])
evaluation_dataset = torch.utils.data.TensorDataset(inputs[320:], targets[320:])
def criterion(outputs, targets):
    while os.path.exists(os.environ.get("STALLED_BY", "")):
        time.sleep(0.05)
    return nn.functional.mse_loss(outputs, targets)
def model():
    return nn.Linear(4, 1)
def optimizer(params):
    return torch.optim.SGD(params, lr=1e-2)
"""


@contextmanager
def worker(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`autoaccum tune` on the study in `folder`; gone at the end."""
    command = (
        f"tune line.py --target-batch 32 --trials {TRIALS} --budget-samples 320 --confirm 0 --device cpu -q --json"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "autoaccum", *command.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rows_in(storage: Storage) -> tuple[Row, ...]:
    """The trials by now; none before there is a study."""
    if "line" not in optuna.get_all_study_names(storage.backend):
        return ()
    return rows_of(optuna.load_study(study_name="line", storage=storage.backend).get_trials(), 0)


def ran_by(pid: int, row: Row) -> bool:
    return row.worker is not None and row.worker.endswith(f":{pid}")


def wait_until(holds: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    """Until that holds, as long as those processes run."""
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def processes_below(pid: int) -> set[int]:
    """All that process has started, and those they have."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(child)} | processes_below(int(child))
    return found


def lives(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "line.py").write_text(LINE)
    return open_storage(str(folder / "tune.db"), heartbeat=20.0)


@pytest.fixture(scope="module")
def outcome(storage: Storage) -> Iterator[dict[str, Any]]:
    """The first worker stalls in a trial and is killed there; the second one finishes the study."""
    folder = Path(storage.shown).parent
    stop = folder / "stop"
    with worker(folder, STALLED_BY=str(stop)) as first:
        wait_until(lambda: any(row.state == "complete" for row in rows_in(storage)), first)
        stop.touch()
        with worker(folder) as second:

            def has_finished(count: int) -> bool:
                return sum(ran_by(second.pid, row) and row.state != "running" for row in rows_in(storage)) >= count

            wait_until(lambda: has_finished(1), first, second)
            before = rows_in(storage)
            below = processes_below(first.pid)
            first.send_signal(signal.SIGKILL)
            first.wait()
            wait_until(lambda: not any(map(lives, below)))
            said, errors = second.communicate(timeout=240)
            assert second.returncode == 0, errors
            yield {"first": first.pid, "second": second.pid, "before": before, "below": below, "said": json.loads(said)}


def test_what_the_killed_worker_ran_is_run_by_the_other_one(storage: Storage, outcome: dict[str, Any]) -> None:
    running = [row for row in outcome["before"] if row.state == "running" and ran_by(outcome["first"], row)]
    assert len(running) == 1
    assert outcome["below"], "it trained in a process of its own, which is gone with it"
    rows = rows_in(storage)
    lost = [row for row in rows if row.state == "failed"]
    assert [row.number for row in lost] == [running[0].number]
    assert lost[0].reason == f"its worker {lost[0].worker} was lost"
    repeated = [row for row in rows if row.repeats == lost[0].number]
    assert [(row.setting, row.state, ran_by(outcome["second"], row)) for row in repeated] == [
        (lost[0].setting, repeated[0].state, True)
    ]


def test_all_trials_are_accounted_for_and_none_is_run_twice(storage: Storage, outcome: dict[str, Any]) -> None:
    rows = rows_in(storage)
    kept = [row for row in rows if row.state != "failed"]
    assert len(kept) == TRIALS
    assert {row.state for row in kept} <= {"complete", "pruned", "diverged"}
    assert set(Counter(row.setting for row in kept).values()) == {1}
    assert [row.number for row in rows] == list(range(TRIALS + 1))
    for row in outcome["before"]:
        assert row.state == "running" or rows[row.number] == row, "a finished trial stays as it is"
    assert len(outcome["said"]["rows"]) == len(rows)
