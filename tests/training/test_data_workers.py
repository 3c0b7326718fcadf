"""Processes that read data ahead change nothing, and their failures are reported in one sentence."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import (
    DrawingRows,
    DrawingStream,
    RecordedRows,
    Started,
    assert_same,
    drawing_collate,
    indices_of,
    opened,
    planning_batches,
    remaining,
    windows_of,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from autoaccum.errors import DataWorkerError, UsageError
from autoaccum.training.windows import WindowReader

COUNT = 37


class Trap(Dataset[Tensor]):
    """Row 20 does something to the process that reads it."""

    def __init__(self, how: str, note: str = "") -> None:
        self.how, self.note = how, note

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 20 and get_worker_info() is not None:
            if self.how == "exit":
                os._exit(7)
            if self.how == "sleep":
                Path(self.note).write_text(str(os.getpid()))
                time.sleep(120)
            os.kill(os.getpid(), signal.Signals[self.how])
        return torch.tensor([index])


def run_out(source: WindowReader) -> None:
    """Read to the end; before each window, the position is that behind the ones that were read."""
    while True:
        position = source.state_dict()["windows"]
        try:
            if source.next_window() is None:
                return
        except DataWorkerError:
            assert source.state_dict()["windows"] == position, "the window that failed does not count"
            raise


def ordered(dataset: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, num_workers=2, **more)


def test_workers_change_nothing_and_a_run_resumes_with_them() -> None:
    whole, states = remaining(opened(DrawingRows(COUNT), collate=drawing_collate), range(3))
    assert_same(windows_of(opened(DrawingRows(COUNT), workers=2, collate=drawing_collate), range(3)), whole)
    resumed = opened(DrawingRows(COUNT), workers=2, collate=drawing_collate)
    assert resumed.load_state_dict(states[5]) is None
    assert_same(windows_of(resumed, range(1, 3)), whole[6:])
    alone = windows_of(opened(DataLoader(DrawingRows(COUNT), 4, shuffle=True)), range(2))
    loader = ordered(DrawingRows(COUNT), shuffle=True, persistent_workers=True)
    assert_same(windows_of(opened(loader), range(2)), alone)


def test_workers_of_a_stream_give_the_same_again() -> None:
    def make() -> WindowReader:
        return opened(ordered(DrawingStream(COUNT)))

    source = make()
    planning_batches(source)
    whole, states = remaining(source, range(2))
    assert sorted(indices_of(whole, 0)) == sorted(indices_of(whole, 1)) == list(range(COUNT))
    resumed = make()
    note = resumed.load_state_dict(states[5])
    assert note is not None
    assert note.message.code == "read_forward"
    assert_same(windows_of(resumed, range(1, 2)), whole[6:])
    with pytest.raises(UsageError, match="workers is 2, but an IterableDataset .*: give a DataLoader over it"):
        opened(DrawingStream(COUNT), workers=2)


@pytest.mark.slow
def test_workers_may_be_spawned_and_the_users_init_function_runs() -> None:
    more: dict[str, Any] = {"persistent_workers": True, "timeout": 90, "prefetch_factor": 3}
    spawned = DataLoader(
        RecordedRows(COUNT), 4, num_workers=1, multiprocessing_context="spawn", worker_init_fn=Started(), **more
    )
    assert_same(windows_of(opened(spawned), range(2)), windows_of(opened(DataLoader(DrawingRows(COUNT), 4)), range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGBUS", "exit"])
def test_a_dead_worker_is_reported(how: str) -> None:
    source = opened(ordered(Trap(how)), 8)
    source.start_epoch(0)
    assert source.next_window() is not None
    with pytest.raises(DataWorkerError, match=r"a process that reads data failed \(.*\): memory, /dev/shm") as caught:
        run_out(source)
    assert caught.value.exit_code == 3
    assert source.state_dict()["windows"] <= 2, "row 20 is in the third"
    source.close()


@pytest.mark.slow
def test_a_dead_worker_raises_only_where_data_is_read() -> None:
    source = opened(ordered(DrawingRows(200)))
    source.start_epoch(0)
    source.next_window()
    worker = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        time.sleep(0.01)  # SIGCHLD arrives here, where an update could be under way
    with pytest.raises(DataWorkerError):
        run_out(source)
    source.close()


def test_close_ends_a_worker_in_the_midst_of_an_item(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    source = opened(ordered(Trap("sleep", str(note))), 8)
    source.start_epoch(0)
    source.next_window()
    deadline = time.monotonic() + 60
    while not note.exists() or not note.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
