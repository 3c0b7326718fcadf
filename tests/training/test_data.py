"""Data of every kind is recognised, and what is no data is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_data import DrawingRows, DrawingStream, opened
from torch.utils.data import DataLoader, Dataset

from autoaccum.errors import UsageError

x, y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
ROWS = DrawingRows(9)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class CustomLoader(DataLoader[Any]):
    """A loader that makes its batches itself."""

    def __iter__(self) -> Any:
        return iter([x, x])


def map_style(order: str) -> dict[str, Any]:
    return {"kind": "map-style", "samples": None if order == "list" else 9, "order": order}


def batches(length: int | None = None, **of_loader: Any) -> dict[str, Any]:
    return {"kind": "batches", "length": length, **of_loader}


KINDS: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    "dataset": (ROWS, map_style("shuffled"), 9),
    "loader": (DataLoader(ROWS, 2), map_style("BatchSampler of SequentialSampler"), 9),
    "batch sampler": (DataLoader(ROWS, batch_sampler=[[1, 2, 3, 4]]), map_style("list"), None),
    "loader without batches": (DataLoader(ROWS, batch_size=None), batches(batch_size=None, workers=0), None),
    "loader of its own way": (CustomLoader(ROWS, 2), batches(batch_size=2, workers=0), None),
    "samples": (DrawingStream(9), {"kind": "samples", "length": None}, None),
    "list": ([(x, y)] * 3, batches(3), 24),
    "list with numbers of each sample": ([{"x": x, "labels": [0] * 8, "name": "a"}], batches(1), 8),
    "tuple of tensors": ((x, x), batches(2), 16),
    "generator": (iter([x]), batches(), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_recognised(kind: str) -> None:
    data, fingerprint, samples = KINDS[kind]
    source = opened(data, 4)
    assert source.fingerprint == fingerprint
    assert source.samples_per_epoch == samples


REFUSED: dict[str, tuple[Any, str]] = {
    "None": (None, "data is None: give a Dataset with __len__, a DataLoader, or an iterable of batches"),
    "columns": ({"x": x, "y": y}, "data is a dict: .* wrap columns in a Dataset"),
    "samples": (
        [(torch.zeros(3), 1)] * 9,
        r"are no batches \(data\[0\]\[1\] is an int\).*wrap samples in a Dataset",
    ),
    "uneven samples": ([(torch.zeros(3), torch.zeros(4))] * 9, r"are no batches \(batch\[1\] has the length 4"),
    "empty list": ([], "data is an empty list: give at least one batch"),
    "odd entry": ([x, 3], r"are no batches \(batch \(an int\) holds nothing"),
    "no length": (NoLength(), "data is a NoLength: give a Dataset with __len__"),
    "empty dataset": (DrawingRows(0), "a map-style dataset has no samples"),
    "small dataset": (DrawingRows(3), "has 3 samples, fewer than one update .4.: use --target-batch 3 or less"),
}
REFUSED_WHEN_READ: dict[str, tuple[Any, str]] = {
    "nothing": (iter([]), "a list_iterator of batches has no samples"),
    "no samples": (DrawingStream(0), "a DrawingStream of samples has no samples"),
    "numbers": (
        iter([1, 2]),
        "yields something that is not a batch: batch .an int. holds nothing.*: yield batches, or give single",
    ),
    "too few": (iter([torch.zeros(3)]), "has 3 samples, fewer than one update .4."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_data_is_refused(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        opened(data, 4)


@pytest.mark.parametrize("case", REFUSED_WHEN_READ)
def test_what_turns_out_not_to_be_data_is_refused(case: str) -> None:
    data, message = REFUSED_WHEN_READ[case]
    source = opened(data, 4)
    with pytest.raises(UsageError, match=message):
        source.next_window()
