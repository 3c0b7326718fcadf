"""Data of every kind for tests of reading: rows that hold their index and random numbers drawn for them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from autoaccum.sources.workload import Workload
from autoaccum.training.data import open_data
from autoaccum.training.windows import DataSettings, Window, WindowReader


def drawn_row(index: int) -> Tensor:
    """Return the index, and a number from each global generator."""
    return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class DrawingRows(Dataset[Tensor]):
    """Augments each row with all generators."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return drawn_row(index)


class Started:
    """A worker_init_fn that marks the user's own dataset; here, where a spawned process finds it."""

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.note = f"worker {worker_id}"  # type: ignore[attr-defined]


class RecordedRows(DrawingRows):
    note = ""

    def __getitem__(self, index: int) -> Tensor:
        assert self.note.startswith("worker ")
        return super().__getitem__(index)


class UnevenRows(Dataset[Tensor]):
    """Row `n` is as long as `lengths[n]` and filled with `n + 1`."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.lengths[index],), index + 1)


class DrawingStream(IterableDataset[Tensor]):
    """Rows in order, divided among workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (drawn_row(index) for index in range(first, self.count, step))


class DrawingBatches:
    """Batches of the given sizes, any number of times."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Tensor]:
        first = 0
        for size in self.sizes:
            yield torch.stack([drawn_row(index) for index in range(first, first + size)])
            first += size


class StatefulBatches(DrawingBatches):
    """Continues from its state; starts again after its end."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.batch, self.reads = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.batch < len(self.sizes):
            first, size = sum(self.sizes[: self.batch]), self.sizes[self.batch]
            self.batch += 1
            self.reads += 1
            yield torch.stack([drawn_row(index) for index in range(first, first + size)])
        self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


class StatefulSamples(IterableDataset[Any]):
    """Samples in order; stores its position, and starts again without it."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.place = samples, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.samples):
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def drawing_collate(rows: list[Tensor]) -> Tensor:
    """Shifts all rows of a part by one drawn number, their indices aside."""
    shift = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64) * (random.random() + torch.rand(()).item())
    batch: Tensor = default_collate(rows)
    return batch + shift


def padding_collate(rows: list[Tensor]) -> Tensor:
    """Pads to the longest of the part."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def opened(data: Any, target: int | None = 10, *, part_size: int = 4, seed: int = 3, **settings: Any) -> WindowReader:
    """Open data as a training does."""
    source = open_data(data, DataSettings(target_batch=target, seed=seed, **settings))
    source.part_size = part_size
    return source


def planning_batches(reader: WindowReader, longest_of: int | None = None) -> Any:
    """Return the function that makes batches of the data for trials."""
    workload = Workload(model=nn.Linear(1, 1), criterion=nn.MSELoss(), dataset=[0])
    return reader.with_planning_batches(workload, longest_of).batch


def windows_of(source: WindowReader, epochs: range) -> list[tuple[int, Window]]:
    """Return all windows of `epochs`, each with its epoch."""
    return remaining(source, epochs, keep=False)[0]


def remaining(
    source: WindowReader, epochs: range, *, keep: bool = True
) -> tuple[list[tuple[int, Window]], list[dict[str, Any]]]:
    """Return all windows of `epochs`, each with its epoch, and the state after each, loaded from a file."""
    windows, states = [], []
    try:
        for epoch in epochs:
            source.start_epoch(epoch)
            while (window := source.next_window()) is not None:
                windows.append((epoch, window))
                if keep:
                    states.append(through_file(source.state_dict()))
    finally:
        source.close()
    return windows, states


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save a state and load it without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_same(left: list[tuple[int, Window]], right: list[tuple[int, Window]]) -> None:
    """Check that windows are equal bit for bit, in the same parts."""
    assert [(epoch, window.samples, len(window.parts)) for epoch, window in left] == [
        (epoch, window.samples, len(window.parts)) for epoch, window in right
    ]
    for (_, mine), (_, theirs) in zip(left, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parts, theirs.parts, strict=True))


def indices_of(windows: list[tuple[int, Window]], epoch: int) -> list[int]:
    """Return the indices of the rows of an epoch, in order."""
    rows = [part[:, 0].tolist() for at, window in windows if at == epoch for part in window.parts]
    return [int(index) for part in rows for index in part]
