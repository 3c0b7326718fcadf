"""Random nests of everything a batch may be made of."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoaccum.workload.batches import batch_size, has_size, join_batches, move_batch, split_batch

Record = namedtuple("Record", ["first", "second"])


@dataclasses.dataclass
class Bag:
    first: Any
    second: Any = 3
    third: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    first: Any
    second: Any


def tensors(rows: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2)
    kinds = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])
    made = st.builds(lambda shape, dtype: torch.randint(0, 9, (rows, *shape)).to(dtype), shapes, kinds)
    return made | made.map(lambda tensor: tensor.numpy())


def shared() -> st.SearchStrategy[Any]:
    plain = st.none() | st.integers() | st.text(max_size=3) | st.booleans() | st.floats(allow_nan=False)
    return plain | st.just(torch.tensor(2.5)) | st.tuples(st.integers(), st.integers()) | st.just(torch.float32)


def samples(rows: int) -> st.SearchStrategy[Any]:
    words = st.lists(st.text(max_size=3), min_size=rows, max_size=rows)
    numbers = st.lists(st.integers(), min_size=rows, max_size=rows)
    dicts = st.lists(
        st.integers(0, 6).map(lambda boxes: {"boxes": torch.rand(boxes, 4), "label": boxes}),
        min_size=rows,
        max_size=rows,
    )
    return words | numbers | dicts


def nests(rows: int) -> st.SearchStrategy[Any]:
    def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        named = st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
        return (
            st.tuples(inner, inner)
            | st.lists(inner, min_size=1, max_size=3)
            | named
            | named.map(OrderedDict)
            | named.map(UserDict)
            | st.builds(Record, inner, inner)
            | st.builds(Bag, inner, inner)
            | st.builds(Slotted, inner, inner)
        )

    return st.recursive(tensors(rows) | shared() | samples(rows), wrap, max_leaves=8)


def rows_of(node: Any) -> Any:
    """A batch as nested tuples of plain values, with the class of every container."""
    if isinstance(node, Tensor | np.ndarray):
        return type(node).__name__, str(node.dtype), node.tolist()
    if dataclasses.is_dataclass(node):
        return type(node), [rows_of(getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, dict | UserDict):
        return type(node), [(key, rows_of(value)) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return type(node), [rows_of(value) for value in node]
    return node


@st.composite
def batches_and_sizes(draw: st.DrawFn) -> tuple[Any, list[int]]:
    # Longer than any record drawn: a list as long as a part could be read in two ways.
    sizes = draw(st.lists(st.sampled_from([0, 4, 5, 7]), min_size=1, max_size=3))
    total = sum(sizes)
    assume(total > 0)
    # One tensor decides the number of samples, as in any batch a model can be trained on.
    return {"x": torch.rand(total, 2), "nest": draw(nests(total))}, sizes


@settings(max_examples=150, deadline=None)
@given(batches_and_sizes())
def test_joining_the_parts_gives_the_batch(case: tuple[Any, list[int]]) -> None:
    batch, sizes = case
    assert batch_size(batch) == sum(sizes)
    parts = split_batch(batch, sizes)
    assert [batch_size(part) for part in parts] == sizes
    joined = join_batches(parts)
    assert has_size(joined, sum(sizes))
    assert rows_of(joined) == rows_of(batch)


@settings(max_examples=50, deadline=None)
@given(batches_and_sizes())
def test_moving_keeps_everything_but_the_device(case: tuple[Any, list[int]]) -> None:
    batch, _ = case
    assert move_batch(batch, "cpu")["x"] is batch["x"]
    assert rows_of(move_batch(batch, "cpu")) == rows_of(batch)
    assert _devices(move_batch(batch, "meta")) <= {"meta"}
    assert _devices(batch) <= {"cpu"}


def _devices(node: Any) -> set[str]:
    if isinstance(node, Tensor):
        return {node.device.type}
    if dataclasses.is_dataclass(node):
        return set().union(*(_devices(getattr(node, field.name)) for field in dataclasses.fields(node)))
    values: Sequence[Any] = list(node.values()) if isinstance(node, dict | UserDict) else node
    return set().union(*map(_devices, values)) if isinstance(values, list | tuple) else set()
