from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import (
    DrawingRows,
    DrawingStream,
    assert_same,
    drawing_collate,
    indices_of,
    remaining,
    windows_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

import autoaccum
from autoaccum.errors import DataWorkerError
from autoaccum.training.data.source import Source, open_source

COUNT, TARGET = 37, 10


class Trap(Dataset[Tensor]):
    """Row 20 does something to the process that reads it."""

    def __init__(self, how: str, note: str = "") -> None:
        self.how, self.note = how, note

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 20 and get_worker_info() is not None:
            {"raise": self._raise, "sleep": self._sleep, "exit": self._exit}.get(self.how, self._signal)()
        return torch.tensor([index])

    def _raise(self) -> None:
        raise KeyError("mine")

    def _sleep(self) -> None:
        Path(self.note).write_text(str(os.getpid()))
        time.sleep(120)

    def _exit(self) -> None:
        os._exit(7)

    def _signal(self) -> None:
        os.kill(os.getpid(), signal.Signals[self.how])


class TrapStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        trap = Trap("SIGKILL")
        return (trap[index] for index in range(40))


def opened(data: Any, target: int = TARGET, *, workers: int = 2, **more: Any) -> Source:
    source = open_source(data, target_batch=target, seed=3, workers=workers, **more)
    source.part_size = 4
    return source


def run_out(source: Source) -> None:
    while source.next_window() is not None:
        pass


def ordered(dataset: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, num_workers=2, **more)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_workers_change_nothing(persistent: bool) -> None:
    whole, states = remaining(opened(DrawingRows(COUNT), workers=0, collate=drawing_collate), range(3))
    assert_same(windows_of(opened(DrawingRows(COUNT), collate=drawing_collate), range(3)), whole)
    resumed = opened(DrawingRows(COUNT), collate=drawing_collate)
    resumed.restore(states[5])
    assert_same(windows_of(resumed, range(1, 3)), whole[6:])
    alone = windows_of(opened(DataLoader(DrawingRows(COUNT), 4, shuffle=True), workers=0), range(2))
    loader = ordered(DrawingRows(COUNT), shuffle=True, persistent_workers=persistent)
    assert_same(windows_of(opened(loader), range(2)), alone)


@pytest.mark.parametrize("form", ["samples", "loader"])
def test_workers_of_a_stream_give_the_same_again(form: str) -> None:
    def make() -> Source:
        return opened(DrawingStream(COUNT) if form == "samples" else ordered(DrawingStream(COUNT)))

    whole, states = remaining(make(), range(2))
    assert sorted(indices_of(whole, 0)) == sorted(indices_of(whole, 1)) == list(range(COUNT))
    resumed = make()
    resumed.planning_batch()
    told = resumed.restore(states[5])
    assert told is not None
    assert "were read forward" in told
    assert_same(windows_of(resumed, range(1, 2)), whole[6:])


def test_workers_may_be_spawned() -> None:
    def make(workers: int, **more: Any) -> Source:
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(DrawingRows(COUNT), 4, shuffle=True, generator=generator, num_workers=workers, **more)
        return opened(loader, workers=0)

    spawned = make(1, multiprocessing_context="spawn", persistent_workers=True, timeout=90, prefetch_factor=3)
    assert_same(windows_of(spawned, range(2)), windows_of(make(0), range(2)))


def test_the_number_of_workers_decides_the_order_of_a_stream_only() -> None:
    assert opened(DrawingStream(COUNT)).fingerprint() != opened(DrawingStream(COUNT), workers=0).fingerprint()
    assert opened(DrawingRows(COUNT)).fingerprint() == opened(DrawingRows(COUNT), workers=0).fingerprint()


class Started:
    """A worker_init_fn that marks the user's own dataset."""

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.note = f"worker {worker_id}"  # type: ignore[attr-defined]


class Noted(DrawingRows):
    note = ""

    def __getitem__(self, index: int) -> Tensor:
        assert self.note.startswith("worker ")
        return super().__getitem__(index)


def test_the_users_start_of_workers_is_kept() -> None:
    assert len(windows_of(opened(ordered(Noted(COUNT), worker_init_fn=Started())), range(1))) == 4


class Level(Dataset[Tensor]):
    """Tells what it was set to."""

    level = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.level])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_be_changed_between_epochs(workers: int) -> None:
    for data in (Level(), DataLoader(Level(), 4, num_workers=workers)):
        source, seen = opened(data, 8, workers=workers), []
        for epoch in range(3):
            source.start_epoch(epoch)
            getattr(data, "dataset", data).level = epoch
            seen += [part.unique().tolist() for part in source.next_window().parts]  # type: ignore[union-attr]
            source.commit()
            assert source.next_window() is None
        source.close()
        assert seen == [[0], [0], [1], [1], [2], [2]]


def test_the_tensors_of_a_dataset_may_be_exchanged_between_epochs() -> None:
    data, seen = TensorDataset(torch.zeros(8)), []
    source = opened(data, 8, workers=0)
    for epoch in range(2):
        source.start_epoch(epoch)
        data.tensors = (torch.full((8,), float(epoch)),)
        window = source.next_window()
        assert window is not None
        seen.append(window.parts[0][0].max().item())
        source.commit()
        assert source.next_window() is None
    assert seen == [0, 1]


class Pressing(Sampler[int]):
    """Presses Ctrl-C while workers start, which is when a DataLoader asks for the first indices."""

    is_past = False

    def __iter__(self) -> Iterator[int]:
        if multiprocessing.active_children():
            os.kill(os.getpid(), signal.SIGINT)
            self.is_past = True
        return iter(range(COUNT))

    def __len__(self) -> int:
        return COUNT


def test_a_signal_while_workers_start_waits_until_they_have() -> None:
    class Targets(DrawingRows):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index).float(), torch.zeros(2)

    sampler = Pressing()
    loader = DataLoader(Targets(COUNT), 4, sampler=sampler, num_workers=1)
    with pytest.raises(KeyboardInterrupt):
        autoaccum.fit(
            nn.Linear(4, 2), loader, target_batch=8, micro_batch=4, loss=nn.MSELoss(), epochs=1, progress=False
        )
    assert sampler.is_past
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("form", ["rows", "loader", "samples", "loader of samples"])
def test_workers_start_when_they_are_asked_to(form: str) -> None:
    data: Any = DrawingStream(COUNT) if "samples" in form else DrawingRows(COUNT)
    source = opened(DataLoader(data, 4, num_workers=2) if "loader" in form else data)
    source.start_epoch(0)
    assert not multiprocessing.active_children()
    source.start_workers()
    started = {child.pid for child in multiprocessing.active_children()}
    assert len(started) == 2
    assert source.next_window() is not None
    assert {child.pid for child in multiprocessing.active_children()} == started
    source.close()


DEATHS = {
    "SIGKILL": r"a process that reads data died: SIGKILL \(.*\): most likely host memory ran out: use fewer workers",
    "SIGBUS": r"the shared memory that workers hand data over in ran out \(.*\): give /dev/shm more space",
    "exit": r"a process that reads data died: exit code 7 \(.*\): set workers to 0 to see",
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_worker_that_dies_is_told(how: str) -> None:
    source = opened(ordered(Trap(how)), 8)
    source.start_epoch(0)
    assert source.next_window() is not None
    source.commit()
    with pytest.raises(DataWorkerError, match=DEATHS[how]) as caught:
        run_out(source)
    assert caught.value.exit_code == 3
    assert source.state()["samples"] == 8
    source.close()


def test_a_worker_of_a_stream_that_dies_is_told() -> None:
    for data in (TrapStream(), ordered(TrapStream())):
        source = opened(data, 8)
        source.start_epoch(0)
        with pytest.raises(DataWorkerError, match="a process that reads data died: SIGKILL"):
            run_out(source)
        source.close()


def test_a_death_is_told_where_data_is_read_and_nowhere_else() -> None:
    source = opened(ordered(DrawingRows(200)))
    source.start_epoch(0)
    source.next_window()
    worker = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.01)  # SIGCHLD arrives here, where an update could be under way
    with pytest.raises(DataWorkerError):
        run_out(source)
    source.close()


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """No more than `free` files can be opened."""
    gc.collect()  # What earlier tests left may close files at any time.
    taken = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = next(n for n in range(soft) if n - sum(number < n for number in taken) == free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


TOO_MANY = r"file descriptors for the processes that read data ran out \(.*\): raise the limit \(`ulimit"


@pytest.mark.parametrize("form", ["rows", "samples", "loader of samples"])
def test_too_few_file_descriptors_for_workers_are_told(form: str) -> None:
    stream = DrawingStream(COUNT)
    forms: dict[str, Any] = {"rows": DrawingRows(COUNT), "samples": stream, "loader of samples": ordered(stream)}
    source = opened(forms[form])
    source.start_epoch(0)
    with few_descriptors(8), pytest.raises(DataWorkerError, match=TOO_MANY) as caught:
        source.start_workers()
    assert caught.value.exit_code == 3
    assert not multiprocessing.active_children(), "the worker that did start was ended"
    source.close()


def test_what_the_dataset_raises_in_a_worker_comes_through() -> None:
    source = opened(ordered(Trap("raise")), 8)
    source.start_epoch(0)
    with pytest.raises(KeyError, match="in DataLoader worker process"):
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
    source.close()
