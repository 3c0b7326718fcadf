from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size, has_size, join_batches, move_batch, split_batch

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: Tensor
    mask: Tensor
    note: str = "note"


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel())).reshape(count, *shape).float()


FORMS: dict[str, Any] = {
    "tensor": rows(5, 2),
    "tuple": (rows(5, 2), rows(5)),
    "list": [rows(5, 2), rows(5)],
    "dict": {"x": rows(5, 2), "y": rows(5), "scale": 2.0, "name": "a", "none": None, "zero": torch.tensor(3.0)},
    "ordered": OrderedDict(x=rows(5, 2), y=rows(5)),
    "userdict": UserDict(x=rows(5, 2)),
    "dataclass": Sample(rows(5, 3), rows(5)),
    "namedtuple": Pair(rows(5, 2), rows(5)),
    "nested": ({"a": [rows(5, 2), (rows(5), rows(5, 1))]}, Sample(rows(5, 3), rows(5))),
    "captions": {"x": rows(5, 2), "captions": ["a", "b", "c", "d", "e"]},
    "numbers": {"x": rows(5, 2), "lengths": [1, 2, 3, 4, 5], "image_size": (224, 224)},
    "images": ([rows(3, n, 2) for n in range(1, 6)], rows(5)),
    "detection": ([rows(3, 4, 4)] * 5, [{"boxes": rows(n, 4), "labels": rows(n)} for n in (1, 0, 2, 7, 3)]),
    "detection in tuples": (tuple(rows(3, 4, n) for n in range(1, 6)), tuple({"boxes": rows(2, 4)} for _ in range(5))),
    "list of dicts": [{"x": rows(3, 4, 4), "label": n} for n in range(5)],
    "strings": ["a", "b", "c", "d", "e"],
    "numpy": {"x": rows(5, 2).numpy(), "y": rows(5)},
}


def flatten(node: Any) -> list[Any]:
    if isinstance(node, Tensor):
        return [node.tolist()]
    if hasattr(node, "tolist"):
        return [node.tolist()]
    if dataclasses.is_dataclass(node):
        return [type(node), *(flatten(getattr(node, field.name)) for field in dataclasses.fields(node))]
    if isinstance(node, dict | UserDict):
        return [type(node), *((key, flatten(value)) for key, value in node.items())]
    if isinstance(node, list | tuple):
        return [type(node), *(flatten(value) for value in node)]
    return [node]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1], [0, 5]])
def test_splits_and_joins_every_form(form: str, sizes: list[int]) -> None:
    batch = FORMS[form]
    assert batch_size(batch) == 5
    parts = split_batch(batch, sizes)
    assert all(has_size(part, size) for part, size in zip(parts, sizes, strict=True))
    assert flatten(join_batches(parts)) == flatten(batch)


def test_parts_are_views() -> None:
    x = rows(5, 2)
    first, second = split_batch({"x": x}, [2, 3])
    assert first["x"].data_ptr() == x.data_ptr()
    assert second["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_names_both_leaves_that_disagree() -> None:
    with pytest.raises(WorkloadError, match=r"batch\['mask'\] has 7 rows, batch\['x'\] has 4"):
        batch_size({"x": rows(4, 2), "mask": rows(7)})
    with pytest.raises(WorkloadError, match=r"batch\[1\] has 7 rows, batch\[0\] has 4"):
        batch_size([rows(4, 2), rows(7)])


def test_refuses_parts_that_do_not_add_up() -> None:
    with pytest.raises(WorkloadError, match=r"add up to 4, the batch has 5"):
        split_batch(rows(5), [2, 2])


def test_refuses_a_packed_sequence() -> None:
    with pytest.raises(WorkloadError, match=r"batch\['x'\] is a PackedSequence"):
        batch_size({"x": pack_sequence([rows(3), rows(2)]), "y": rows(2)})


def test_moves_aliases_as_one() -> None:
    x = rows(5)
    moved = move_batch({"a": x, "b": x}, "meta")
    assert moved["a"] is moved["b"]
    assert moved["a"].device.type == "meta"
    assert x.device.type == "cpu"
