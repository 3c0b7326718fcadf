"""Every update is a line of JSON, whatever becomes of the disk and of the process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoaccum.training.events import Evaluated, Updated
from autoaccum.training.run_folder.metrics import MetricsLog
from autoaccum.training.run_folder.tensorboard import open_board


def updated(update: int, **figures: Any) -> Updated:
    known: dict[str, Any] = {
        "epoch": 1,
        "samples": 8 * update,
        "loss": 0.5,
        "grad_norm": 2.0,
        "learning_rate": 0.1,
        "samples_per_second": 100.0,
        "peak_bytes": None,
        "micro_batches": 2,
        "micro_batch": 4,
        "retries": 0,
        "updated": True,
    }
    return Updated(update=update, **{**known, **figures})


def refuse(reason: str) -> None:
    pytest.fail(reason)


def lines(path: Path) -> list[dict[str, Any]]:
    def not_json(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    return [json.loads(line, parse_constant=not_json) for line in path.read_text().splitlines()]


def test_lines_have_their_figures_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, refuse)
    log.resume(0)
    log.write(updated(1))
    log.write(
        updated(2, loss=float("nan"), grad_norm=float("inf"), noise_scale=3.5, terms={"a": float("nan"), "b": 1.0})
    )
    log.write_evaluation(Evaluated(update=2, values={"loss": 0.25}, samples=10, seconds=1.0))
    first, second, third = lines(path)
    assert ",".join(first) == (
        "update,epoch,samples,loss,grad_norm,learning_rate,samples_per_second,peak_bytes,retries,micro_batches,"
        "micro_batch,updated"
    )
    assert (second["loss"], second["grad_norm"]) == (None, None)
    assert [*second][-2:] == ["noise_scale", "terms"]
    assert second["terms"] == {"a": None, "b": 1.0}
    assert third == {"update": 2, "evaluation": {"loss": 0.25}, "samples": 10}
    log.close()


def test_resuming_drops_what_is_made_again_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, refuse)
    for update in range(1, 6):
        log.write(updated(update))
        log.write_evaluation(Evaluated(update=update, values={"loss": 0.25}, samples=10, seconds=1.0))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    for update, count in ((5, 9), (5, 9), (3, 6), (9, 6), (0, 0)):
        other = MetricsLog(path, refuse)
        other.resume(update)
        assert len(lines(path)) == count
        assert whole.startswith(path.read_bytes())
    other.write(updated(1))
    assert [line["update"] for line in lines(path)] == [1]
    other.close()


def test_an_evaluation_that_is_made_again_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, refuse)
    for update in (1, 2):
        log.write(updated(update))
        log.write_evaluation(Evaluated(update=update, values={"loss": 0.25}, samples=10, seconds=1.0))
    log.close()
    for evaluated_at, count in ((2, 4), (1, 3)):
        log.resume(2, evaluated_at)
        assert len(lines(path)) == count
    assert "loss" in lines(path)[-1]


def test_what_is_no_line_of_ours_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, refuse)
    log.write(updated(1))
    log.close()
    with path.open("ab") as file:
        file.write(b'\xff\n[1]\n{"update": "x"}\n')
    log.write(updated(2))
    log.resume(2)
    assert path.read_bytes().count(b"\n") == 5
    log.close()


FULL = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_metrics import MetricsLog, open_board, updated
log = MetricsLog(Path(sys.argv[1]), print)
log.write(updated(1))
board = open_board(Path(sys.argv[1]).parent / "board", 0)
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size - 20, resource.RLIM_INFINITY))
log.write(updated(2))
log.write(updated(3))
if board is not None:
    for update in range(1, 9):
        board.write(updated(update))
assert Path(sys.argv[1]).stat().st_size == size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write(updated(4))
log.close()
if board is not None:
    board.write(updated(10))
    board.close()
"""


def test_a_full_disk_loses_lines_but_no_part_of_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-W", "error", "-c", FULL, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path} cannot be written (File too large): lines of it are missing\n"
    assert [line["update"] for line in lines(path)] == [1, 4]
    if importlib.util.find_spec("tensorboard") is not None:
        steps = [step for step, _ in scalars(tmp_path / "board")["train/loss"]]
        assert steps[-1] == 10
        assert len(steps) < 9


def test_a_file_that_cannot_be_opened_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    log = MetricsLog(tmp_path, told.append)
    log.resume(3)
    log.write(updated(1))
    log.write(updated(2))
    assert told == [f"{tmp_path} cannot be written (Is a directory): lines of it are missing"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(entry.step, entry.value) for entry in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_same_where_it_is_installed(tmp_path: Path) -> None:
    board = open_board(tmp_path, 0)
    assert (board is not None) == (importlib.util.find_spec("tensorboard") is not None)
    if board is None:
        return
    for update in (1, 2, 3):
        board.write(updated(update, loss=float(update), terms={"a": 1.5}))
    board.write_evaluation(Evaluated(update=3, values={"loss": 0.25}, samples=10, seconds=1.0))
    board.close()
    resumed = open_board(tmp_path, 2)
    assert resumed is not None
    resumed.write(updated(3, loss=9.0))
    resumed.close()
    shown = scalars(tmp_path)
    assert shown["train/loss"] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    assert shown["terms/a"] == [(1, 1.5), (2, 1.5)]
    assert "evaluation/loss" not in shown or shown["evaluation/loss"] == []
    assert "train/peak_bytes" not in shown


def test_without_tensorboard_there_is_no_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert open_board(tmp_path, 0) is None
    assert list(tmp_path.iterdir()) == []
