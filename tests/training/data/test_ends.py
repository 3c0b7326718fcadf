from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_data import windows_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from autoaccum.training.data.ends import NoEnd
from autoaccum.training.data.source import open_source

COUNT = 12


class Rows(Dataset[Tensor]):
    """The row asked for last stops an iteration, when it is read by itself or put into a batch."""

    def __init__(self, stops_at: int | None = COUNT - 1) -> None:
        self.stops_at = stops_at

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        if index == self.stops_at:
            next(iter(()))
        return torch.tensor([index])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([index]) for index in range(COUNT))


def stopping_collate(rows: list[Tensor]) -> Any:
    if any(int(row[0]) == COUNT - 1 for row in rows):
        next(iter(()))
    return default_collate(rows)


def give_rows(row: Any) -> Any:
    """Of a loader without batches."""
    return row


FORMS: dict[str, Any] = {
    "dataset": lambda workers: (Rows(), None),
    "collate": lambda workers: (Rows(None), stopping_collate),
    "collate of samples": lambda workers: (Stream(), stopping_collate),
    "loader": lambda workers: (DataLoader(Rows(), 4, num_workers=workers), None),
    "loader's collate": lambda workers: (
        DataLoader(Rows(None), 4, num_workers=workers, collate_fn=stopping_collate),
        None,
    ),
    "loader's collate of samples": lambda workers: (
        DataLoader(Stream(), 4, num_workers=workers, collate_fn=stopping_collate),
        None,
    ),
    "loader without batches": lambda workers: (
        DataLoader(Rows(), batch_size=None, num_workers=workers, collate_fn=give_rows),
        None,
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_what_stops_an_iteration_by_mistake_ends_no_epoch(form: str, workers: int) -> None:
    data, collate = FORMS[form](workers)
    source = open_source(data, target_batch=4, seed=0, workers=workers, collate=collate)
    source.part_size = 4
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        windows_of(source, range(1))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [Rows(None), Stream()], ids=["rows", "stream"])
def test_a_true_end_is_one(data: Any, workers: int) -> None:
    for loader in (
        DataLoader(data, 4, num_workers=workers),
        DataLoader(data, batch_size=None, num_workers=workers),
    ):
        source = open_source(loader, target_batch=4, seed=0, workers=0)
        assert sum(window.samples for _, window in windows_of(source, range(1))) == COUNT
        assert not isinstance(loader.collate_fn, NoEnd)
