from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_data import DrawingRows, DrawingStream, opened
from torch.utils.data import DataLoader, Dataset

from autoaccum.errors import UsageError

x, y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class CustomLoader(DataLoader[Any]):
    """A loader that makes its batches itself."""

    def __iter__(self) -> Any:
        return iter([x, x])


class Numbers:
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


KINDS: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    "dataset": (
        lambda: DrawingRows(1797),
        {"kind": "map-style", "samples": 1797, "order": "shuffled"},
        1797,
    ),
    "loader": (
        lambda: DataLoader(DrawingRows(9), 2),
        {"kind": "map-style", "samples": 9, "order": "BatchSampler of SequentialSampler"},
        9,
    ),
    "batch sampler": (
        lambda: DataLoader(DrawingRows(9), batch_sampler=[[1, 2, 3, 4]]),
        {"kind": "map-style", "samples": None, "order": "list"},
        None,
    ),
    "loader without batches": (
        lambda: DataLoader(DrawingRows(9), batch_size=None),
        {"kind": "batches", "length": None, "batch_size": None, "workers": 0},
        None,
    ),
    "loader of its own way": (
        lambda: CustomLoader(DrawingRows(9), 2),
        {"kind": "batches", "length": None, "batch_size": 2, "workers": 0},
        None,
    ),
    "samples": (
        lambda: DrawingStream(9),
        {"kind": "samples", "length": None},
        None,
    ),
    "list": (lambda: [(x, y)] * 3, {"kind": "batches", "length": 3}, 24),
    "tuple of tensors": (lambda: (x, x), {"kind": "batches", "length": 2}, 16),
    "generator": (lambda: iter([x]), {"kind": "batches", "length": None}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_recognised(kind: str) -> None:
    make, fingerprint, samples = KINDS[kind]
    source = opened(make(), 4)
    assert source.fingerprint() == fingerprint
    assert source.samples_per_epoch == samples


REFUSED: dict[str, tuple[Any, str]] = {
    "None": (None, "data is None: give a Dataset, a DataLoader, or an iterable of batches"),
    "number": (3, "data is an int: give a Dataset"),
    "columns": ({"x": x, "y": y}, "data is a dict: wrap tensors by column in a Dataset"),
    "samples": (
        [(torch.zeros(3), 1)] * 9,
        r"are no batches \(data\[0\]\[1\] is an int\).*wrap samples in a Dataset",
    ),
    "uneven samples": ([(torch.zeros(3), torch.zeros(4))] * 9, r"are no batches \(batch\[1\] has the length 4"),
    "empty list": ([], "data is an empty list: give at least one batch"),
    "odd entry": ([x, 3], r"are no batches \(batch \(an int\) holds nothing"),
    "no length": (NoLength(), "a NoLength has no length: define __len__, or give a DataLoader of it"),
    "empty dataset": (DrawingRows(0), "a map-style dataset has no samples"),
    "small dataset": (DrawingRows(3), "has 3 samples, fewer than the target batch of 4: use --target-batch 3 or less"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_is_not_data(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        opened(data, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([]), "a list_iterator of batches has no samples"),
        (DrawingStream(0), "a DrawingStream of samples has no samples"),
        (
            Numbers(),
            "yields something that is not a batch: batch .an int. holds nothing.*: yield batches, or give single",
        ),
        (iter([torch.zeros(3)]), "has 3 samples, fewer than the target batch of 4"),
    ],
    ids=["nothing", "no samples", "numbers", "too few"],
)
def test_refuses_iterables_without_batches(data: Any, message: str) -> None:
    source = opened(data, 4)
    source.start_epoch(0)
    with pytest.raises(UsageError, match=message):
        source.next_window()


def test_lists_may_hold_numbers_of_each_sample() -> None:
    assert opened([{"x": x, "labels": [0] * 8, "name": "a"}], 4).samples_per_epoch == 8


def test_batches_without_samples_are_skipped() -> None:
    source = opened(iter([x[:0], x[:3], x[:0], x[:5]]), 4)
    source.start_epoch(0)
    windows = [source.next_window() for _ in range(3)]
    assert [window and window.samples for window in windows] == [4, 4, None]
