from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.training.data.regrouping import are_joinable, regroup
from autoaccum.workload.batches import batch_size, split_batch

x = torch.arange(12.0).reshape(6, 2)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8), widths=st.data(), ceiling=st.integers(1, 40))
def test_keeps_the_order_of_samples_and_the_padding_of_each(
    sizes: list[int], widths: st.DataObject, ceiling: int
) -> None:
    wide = widths.draw(st.lists(st.integers(1, 2), min_size=len(sizes), max_size=len(sizes)))
    first = 0
    parts = []
    for size, width in zip(sizes, wide, strict=True):
        rows = torch.arange(first, first + size)
        parts.append({"x": rows[:, None].expand(size, width), "y": rows.tolist(), "name": "a"})
        first += size
    joined = regroup(parts, sizes, ceiling)
    assert [row for part in joined for row in part["x"][:, 0].tolist()] == list(range(first))
    assert [row for part in joined for row in part["y"]] == list(range(first))
    assert sum(map(batch_size, joined)) == first
    if ceiling >= first:
        assert all(left["x"].shape[1] != right["x"].shape[1] for left, right in zip(joined, joined[1:], strict=False))


JOINED: dict[str, Any] = {
    "tensors": x,
    "pairs": (x, x[:, 0]),
    "dicts": {"x": x, "scale": 2.0, "name": "a", "none": None, "zero": torch.tensor(3.0)},
    "captions": {"x": x, "captions": list("abcdef")},
    "images of unequal shape": ([torch.zeros(4, n + 1) for n in range(6)], x),
    "arrays": {"x": x.numpy(), "size": (224, 224)},
    "records per sample": [{"x": torch.zeros(2), "label": n} for n in range(6)],
}


@pytest.mark.parametrize("form", JOINED)
def test_joins_the_parts_of_one_batch(form: str) -> None:
    parts = split_batch(JOINED[form], [2, 1, 3])
    joined = regroup(parts, [2, 1, 3], 6)
    assert len(joined) == 1
    assert str(joined[0]) == str(JOINED[form])


APART: dict[str, tuple[Any, Any]] = {
    "trailing shapes": (torch.zeros(2, 3), torch.zeros(2, 4)),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.long)),
    "types": (torch.zeros(2), np.zeros(2)),
    "keys": ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
    "lengths of a record": ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2),)),
    "a number of all samples": ({"x": torch.zeros(2), "scale": 1.0}, {"x": torch.zeros(2), "scale": 2.0}),
    "a tensor of all samples": (
        {"x": torch.zeros(2), "scale": torch.tensor(1.0)},
        {"x": torch.zeros(2), "scale": torch.tensor(2.0)},
    ),
    "an object of all samples": ({"x": torch.zeros(2), "what": object()}, {"x": torch.zeros(2), "what": object()}),
    "a value that is no number": ({"x": torch.zeros(2), "v": float("nan")}, {"x": torch.zeros(2), "v": float("nan")}),
}


@pytest.mark.parametrize("difference", APART)
def test_parts_that_differ_stay_apart(difference: str) -> None:
    left, right = APART[difference]
    assert not are_joinable(left, 2, right, 2)
    assert len(regroup([left, right], [2, 2], 4)) == 2


def test_nothing_is_copied_where_a_join_would_save_no_micro_batch() -> None:
    parts = [torch.zeros(64), torch.zeros(64)]
    assert regroup(parts, [64, 64], 64)[0] is parts[0]
    assert len(regroup(parts, [64, 64], 100)) == 2
    assert len(regroup(parts, [64, 64], 128)) == 1
