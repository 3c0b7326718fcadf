"""A run folder is made, locked by one process at a time, and refused in one line where it cannot be used."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import UsageError
from autoaccum.training.checkpoints.contents import NotPortableError
from autoaccum.training.run_folder.run_folder import RunFolder

HOLD = """
import sys
from autoaccum.training.run_folder.run_folder import RunFolder
with RunFolder.open(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_the_folder_and_its_parents_are_made(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "runs" / "a") as run:
        assert run.checkpoints.folder == tmp_path / "runs" / "a" / "checkpoints"
        assert run.checkpoints.folder.is_dir()
        names = (run.metrics_path.name, run.plan_path.name, run.model_path.name, run.tensorboard_dir.name)
        assert names == ("metrics.jsonl", "plan.json", "model.pt", "tensorboard")
        assert run.note is None


def test_a_second_run_is_refused_until_the_first_is_over(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match=rf"is in use by process {first.pid} on .*: wait until it ends, or give"):
            RunFolder.open(tmp_path)
        first.send_signal(signal.SIGKILL)
    RunFolder.open(tmp_path).close()


def test_one_process_cannot_open_it_twice(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path), pytest.raises(UsageError, match=f"is in use by process {os.getpid()} on "):
        RunFolder.open(tmp_path)
    RunFolder.open(tmp_path).close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 advises against fork.
def test_forked_workers_do_not_hold_it(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path)
    fork: Any = multiprocessing.get_context("fork")
    runs, ends = fork.Event(), fork.Event()
    worker = fork.Process(target=lambda: (runs.set(), ends.wait(60)), daemon=True)
    worker.start()
    assert runs.wait(60)
    with pytest.raises(UsageError, match="is in use"):  # The worker's letting go is not the parent's.
        RunFolder.open(tmp_path)
    os.close(run._lock._handle)  # type: ignore[arg-type]  # As a process that is killed does.
    run._lock._handle = None
    RunFolder.open(tmp_path).close()
    ends.set()
    worker.join(60)
    assert worker.exitcode == 0


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def below_a_file(folder: Path) -> Path:
    return a_file(folder) / "runs"


def no_file_system(folder: Path) -> Path:
    return Path("/proc/autoaccum")


def a_folder_for_a_lock(folder: Path) -> Path:
    (folder / "autoaccum.lock").mkdir()
    return folder


def a_long_name(folder: Path) -> Path:
    return folder / ("a" * 300)


def no_name(folder: Path) -> str:
    return ""


def a_null_byte(folder: Path) -> Path:
    return folder / "a\0b"


UNUSABLE: dict[Callable[[Path], Path | str], str] = {
    a_file: "is no folder, or lies below a file: give another folder",
    below_a_file: "is no folder, or lies below a file: give another folder",
    no_file_system: "/proc/autoaccum cannot be written to (No such file or directory): give another folder",
    a_folder_for_a_lock: "cannot be written to (Is a directory): give another folder",
    a_long_name: "cannot be written to (File name too long): give another folder",
    a_null_byte: "cannot be written to (",
    no_name: "the run folder has no name: name one",
}


@pytest.mark.parametrize("place", UNUSABLE, ids=lambda place: place.__name__)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    place: Callable[[Path], Path | str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        RunFolder.open(place(tmp_path))
    assert UNUSABLE[place] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", "model.pt", "tensorboard"])
def test_files_of_someone_else_are_not_written_over(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=rf"holds {name} and no checkpoint of a run: training would write over what"):
        RunFolder.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_called_lock_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    RunFolder.open(tmp_path).close()
    assert (tmp_path / "lock").read_text() == "mine"


def test_it_stays_where_it_is_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder.open("run") as run:
        assert run.path == run.model_path.parent == tmp_path / "run"


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path) as run:
        run.checkpoints.write(1, {})
    left = [tmp_path / ".model.pt.12.tmp", tmp_path / "checkpoints" / ".checkpoint-00000001.pt.12.tmp"]
    for path in left:
        path.touch()
    RunFolder.open(tmp_path).close()
    assert not any(path.exists() for path in left)


def test_the_weights_are_a_plain_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with RunFolder.open(tmp_path) as run:
        assert run.write_model(nn.DataParallel(model)) == run.model_path
    weights = torch.load(run.model_path, weights_only=True)
    assert model.load_state_dict(weights).missing_keys == []
    assert [*weights] == [*model.state_dict()]


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"function": print}


def test_weights_with_an_object_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path) as run:
        with pytest.raises(NotPortableError, match=r"model.pt cannot hold _extra_state.function: it is a builtin"):
            run.write_model(Odd(1, 1))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["autoaccum.lock", "checkpoints"]
