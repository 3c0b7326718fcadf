"""A run folder is created, locked by one process at a time, and refused in one line if it cannot be used."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import UsageError
from autoaccum.training.checkpoints import NotPortableError
from autoaccum.training.run_folder import RunFolder


def hold(folder: Path, opened: Any, over: Any) -> None:
    """Be a run with a worker, which outlives it."""
    with RunFolder(folder):
        if os.fork() == 0:
            over.wait(120)
            os._exit(0)
        opened.set()
        signal.pause()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 advises against fork.
def test_a_second_run_is_refused_until_the_first_is_over_and_its_workers_do_not_hold_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    opened, over = context.Event(), context.Event()
    first = context.Process(target=hold, args=(tmp_path, opened, over))
    first.start()
    try:
        assert opened.wait(120)
        with pytest.raises(UsageError, match=rf"is in use by process {first.pid} on .*: wait for it, or use"):
            RunFolder(tmp_path)
    finally:
        first.kill()
        first.join()
    with RunFolder(tmp_path):
        over.set()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 advises against fork.
def test_a_worker_that_ends_leaves_it_locked(tmp_path: Path) -> None:
    def attempt() -> None:
        with pytest.raises(UsageError, match="is in use"):
            RunFolder(tmp_path)

    with RunFolder(tmp_path):
        for _ in range(2):
            worker = multiprocessing.get_context("fork").Process(target=attempt)
            worker.start()
            worker.join(60)
            assert worker.exitcode == 0


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


UNUSABLE: dict[Callable[[Path], Path | str], str] = {
    a_file: "is not a folder, or lies below a file: use another folder",
    lambda _: "/proc/autoaccum": "/proc/autoaccum cannot be written to (No such file or directory): use another",
    lambda folder: folder / "a\0b": "cannot be written to (",
}


@pytest.mark.parametrize("place", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(
    place: Callable[[Path], Path | str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        RunFolder(place(tmp_path))
    assert UNUSABLE[place] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_someone_else_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine")
    with pytest.raises(UsageError, match=r"holds plan.json and no checkpoint: training would overwrite"):
        RunFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"function": print}


def test_the_weights_are_a_plain_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with RunFolder(tmp_path / "runs" / "a") as run:
        path = run.write_weights(model.state_dict())
        with pytest.raises(NotPortableError, match=r"ema.pt cannot hold _extra_state.function: it is a builtin"):
            run.write_weights(Odd(1, 1).state_dict(), "ema.pt")
    weights = torch.load(path, weights_only=True)
    assert model.load_state_dict(weights).missing_keys == []
    assert sorted(path.name for path in run.path.iterdir()) == ["autoaccum.lock", "checkpoints", "model.pt"]
