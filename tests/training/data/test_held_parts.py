from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from autoaccum.errors import UsageError
from autoaccum.training.data.held_parts import HeldParts
from autoaccum.training.data.source import open_source

COUNT, SIZE = 64, 4


class OneBuffer:
    """Batches of consecutive rows, in turns in as many buffers as asked for."""

    def __init__(self, make: Callable[[], Any], buffers: int = 1, from_batch: int = 0) -> None:
        self.make, self.buffers, self.from_batch = make, buffers, from_batch

    def __iter__(self) -> Iterator[Any]:
        buffers = [self.make() for _ in range(self.buffers)]
        for number in range(COUNT // SIZE):
            batch = buffers[number % self.buffers] if number >= self.from_batch else self.make()
            rows = np.arange(number * SIZE, number * SIZE + SIZE, dtype=np.float32).reshape(SIZE, 1)
            fill(batch, np.repeat(rows, 3, 1))
            yield batch


def fill(batch: Any, rows: np.ndarray[Any, Any]) -> None:
    if isinstance(batch, dict):
        batch["x"] = torch.from_numpy(rows)
    elif isinstance(batch, list):
        fill(batch[0], rows)
    elif isinstance(batch, np.ndarray):
        batch[:] = rows
    elif isinstance(batch, Memory):
        batch.array[:] = rows
    else:
        batch.copy_(torch.from_numpy(rows))


class Memory(torch.Tensor):
    """A tensor over an array's memory, which is written to without its knowledge."""

    array: Any


def over_array() -> torch.Tensor:
    array = np.zeros((SIZE, 3), np.float32)
    tensor = torch.from_numpy(array).as_subclass(Memory)
    tensor.array = array
    return tensor


BUFFERS: dict[str, Any] = {
    "tensor": lambda: torch.zeros(SIZE, 3),
    "array": lambda: np.zeros((SIZE, 3), np.float32),
    "columns": lambda: np.zeros((3, SIZE), np.float32).T,
    "tensor over an array": over_array,
    "list": lambda: [torch.zeros(SIZE, 3), 7],
    "the same dict": dict,
}


def first_column(part: Any) -> list[int]:
    part = part["x"] if isinstance(part, dict) else part[0] if isinstance(part, list) else part
    return [int(row[0]) for row in part]


def rows_of(data: Any, target: int, **more: Any) -> list[int]:
    """The first column of an epoch, each window looked at before the next is read."""
    source = open_source(data, target_batch=target, seed=0, **{"workers": 0, **more})
    source.part_size = SIZE
    source.start_epoch(0)
    rows: list[int] = []
    while (window := source.next_window()) is not None:
        rows.extend(index for part in window.parts for index in first_column(part))
        source.commit()
    source.close()
    return rows


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("target", [3, 6, 8, 14, 64])
def test_a_buffer_that_is_filled_again_changes_no_part(kind: str, target: int) -> None:
    for buffers in (1, 2, 4):
        assert rows_of(OneBuffer(BUFFERS[kind], buffers), target) == list(range(COUNT))


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_comes_late_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"an? OneBuffer of batches writes to a batch it gave before.*: yield"):
        rows_of(OneBuffer(BUFFERS[kind], from_batch=4), 8)
    with pytest.raises(UsageError, match="writes to a batch it gave before"):
        rows_of(OneBuffer(BUFFERS[kind], buffers=5), 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_fills_one_buffer_again_changes_no_part(workers: int) -> None:
    rows = torch.arange(COUNT, dtype=torch.float32).repeat(3, 1).T.contiguous()
    buffer = torch.zeros(SIZE, 3)

    def collate(samples: list[Any]) -> Any:
        buffer.copy_(torch.stack(samples))
        return {"x": buffer, "n": 1}

    loader: Any = DataLoader(rows, SIZE, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]
    assert sorted(rows_of(rows, 8, collate=collate, workers=workers)) == list(range(COUNT))
    assert rows_of(loader, 8) == list(range(COUNT))


def views(of: torch.Tensor, step: int) -> list[torch.Tensor]:
    return [of[first : first + SIZE] for first in range(0, len(of) - SIZE, step)]


@pytest.mark.parametrize("step", [1, SIZE], ids=["sliding", "slices"])
def test_views_that_nobody_writes_to_are_not_copied(step: int) -> None:
    whole = torch.randn(COUNT, 3)
    whole[3] = float("nan")
    held = HeldParts("data")
    batches = iter(views(whole, step))
    for _ in range(3):
        held.begin()
        for _ in range(3):
            held.add(held.read(lambda: next(batches)))
        assert all(part.data_ptr() - whole.data_ptr() < whole.nbytes for part in held.done())


def test_a_cache_that_is_filled_beside_what_it_gave_is_no_mistake() -> None:
    cache = torch.zeros(COUNT, 3)

    def batches() -> Iterator[torch.Tensor]:
        for first in range(0, COUNT, SIZE):
            if first >= 4 * SIZE:
                cache[first : first + SIZE] = torch.arange(first, first + SIZE)[:, None]
            yield cache[first : first + SIZE]

    seen = rows_of(batches(), 2 * SIZE)
    assert seen == [0] * 4 * SIZE + list(range(4 * SIZE, COUNT))
