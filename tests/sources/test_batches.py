from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from batch_rows import rows_of
from example_counts import count_examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size, has_size, join_batches, move_batch, split_batch, wrap_batch
from autoaccum.sources.pytree import unwrap_batch


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel())).reshape(count, *shape).float()


FORMS: dict[str, Any] = {
    "userdict": UserDict(x=rows(5, 2)),
    "captions": {"x": rows(5, 2), "captions": ["a", "b", "c", "d", "e"]},
    "numbers": {"x": rows(5, 2), "lengths": [1, 2, 3, 4, 5], "image_size": (224, 224)},
    "images": ([rows(3, n, 2) for n in range(1, 6)], rows(5)),
    "ragged numbers": {"x": rows(5, 2), "ids": [[1], [2, 3], [4, 5, 6, 7, 8], [9], []]},
    "lists of pairs of strings": [["a", "b", "c", "d", "e"], ["f", "g", "h", "i", "j"]],
    "strings": ["a", "b", "c", "d", "e"],
    "numpy": {"x": rows(5, 2).numpy(), "y": rows(5)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1], [0, 5]])
def test_splits_and_joins_every_structure(form: str, sizes: list[int]) -> None:
    batch = wrap_batch(FORMS[form], None)
    assert batch_size(FORMS[form]) == batch_size(batch) == 5
    assert rows_of(unwrap_batch(batch)) == rows_of(FORMS[form])
    parts = split_batch(batch, sizes)
    assert all(has_size(part, size) for part, size in zip(parts, sizes, strict=True))
    assert rows_of(join_batches(parts)) == rows_of(batch)


def test_parts_are_views() -> None:
    x = rows(5, 2)
    first, second = split_batch({"x": x}, [2, 3])
    assert first["x"].data_ptr() == x.data_ptr()
    assert second["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_names_both_leaves_that_disagree() -> None:
    with pytest.raises(WorkloadError, match=r"batch\['mask'\] has the length 7, batch\['x'\] has 4"):
        batch_size({"x": rows(4, 2), "mask": rows(7)})
    with pytest.raises(WorkloadError, match=r"batch\[1\] has the length 7, batch\[0\] has 4"):
        batch_size([rows(4, 2), rows(7)])


def test_refuses_parts_that_do_not_add_up() -> None:
    for sizes in ([2, 2], [6, -1]):
        with pytest.raises(WorkloadError, match=r"the batch has 5: give sizes that put every sample into"):
            split_batch(rows(5), sizes)


class Opaque:
    def __init__(self, content: Any) -> None:
        self.content = content


class Slots:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


REFUSED: dict[str, tuple[Any, str]] = {
    "packed sequence": ({"x": pack_sequence([rows(3), rows(2)])}, r"batch\['x'\] is a PackedSequence, which cannot"),
    "object": ((rows(2), {"a": Opaque(rows(2))}), r"batch\[1\]\['a'\] is an Opaque, which cannot be split"),
    "objects": ((rows(2), [Opaque(rows(2))]), r"batch\[1\] has the length 1, batch\[0\] has 2"),
    "object with slots": ((rows(2), Slots(rows(2))), r"batch\[1\] is a Slots"),
    "set of tensors": ((rows(2), {rows(2)}), r"batch\[1\] is a set, which cannot be split"),
    "module": ((rows(2), torch.nn.Linear(1, 1)), r"batch\[1\] is a Linear, which cannot be split"),
    "sparse": (rows(2, 2).to_sparse(), r"holds a sparse_coo tensor, which cannot be split"),
    "no values": ((rows(2), torch.empty(2, device="meta")), r"holds a tensor on the meta device, which has no values"),
    "nothing with rows": ({"a": 3, "b": torch.tensor(2)}, r"batch \(a dict\) holds nothing with a batch dimension"),
    "images and labels": (
        {"images": [rows(3, 2, 2), rows(4, 2, 2)], "y": rows(5)},
        r"batch\['y'\] has the length 5, batch\['images'\] has 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_cannot_be_split(case: str) -> None:
    batch, message = REFUSED[case]
    with pytest.raises(WorkloadError, match=message) as caught:
        batch_size(batch)
    assert "\n" not in str(caught.value)


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`: a UserDict with attributes of its own."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


def test_mappings_keep_their_class() -> None:
    x, y = rows(4, 2), rows(4)
    mappings: list[Any] = [Encoding({"x": x, "y": y}, "kept"), OrderedDict(x=x), MappingProxyType({"x": x})]
    for mapping in mappings:
        first, _ = split_batch({"m": mapping}, [1, 3])
        assert type(first["m"]) is type(mapping)
        assert [len(value) for value in first["m"].values()] == [1] * len(mapping)
        assert [len(value) for value in mapping.values()] == [4] * len(mapping)
        assert getattr(first["m"], "encodings", "kept") == "kept"


class Movable(Opaque):
    def to(self, device: torch.device) -> Movable:
        self.content, self.moved_to = self.content.to(device), device
        return self


def test_moves_tensors_in_objects_which_may_have_a_method_for_it() -> None:
    batch = [Opaque(rows(1)), Opaque({"a": rows(2)}), Movable(rows(1))]
    first, second, third = move_batch(batch, "meta")
    assert type(first) is Opaque
    assert (first.content.is_meta, second.content["a"].is_meta, third.content.is_meta) == (True, True, True)
    assert third.moved_to.type == "meta"
    assert not batch[2].content.is_meta


def test_refuses_to_join_parts_of_different_structure() -> None:
    with pytest.raises(WorkloadError, match=r"batch\['x'\] of several batches cannot be joined \(Sizes of"):
        join_batches([{"x": rows(2, 3)}, {"x": rows(2, 4)}])
    with pytest.raises(WorkloadError, match=r"the parts differ in the structure of batch"):
        join_batches([{"x": rows(2)}, {"y": rows(2)}])
    with pytest.raises(WorkloadError, match=r"no parts to join"):
        join_batches([])


def test_one_batch_given_twice_is_joined_to_twice_its_samples() -> None:
    names = ["a", "b", "c"]
    batch = {"inner": (rows(2), {"x": rows(2)}), "names": names}
    joined = join_batches([batch, batch])
    assert batch_size(joined) == 4
    assert joined["names"] is names
    assert len(joined["inner"][1]["x"]) == 4


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


def pytrees(rows: int) -> st.SearchStrategy[Any]:
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


@st.composite
def batches_and_sizes(draw: st.DrawFn) -> tuple[Any, list[int]]:
    # Longer than any record drawn: a list as long as a part could be read in two ways.
    sizes = draw(st.lists(st.sampled_from([0, 4, 5, 7]), min_size=1, max_size=3))
    total = sum(sizes)
    assume(total > 0)
    # One tensor decides the number of samples, as in any batch a model can be trained on.
    return {"x": torch.rand(total, 2), "nested": draw(pytrees(total))}, sizes


@settings(max_examples=count_examples(150), deadline=None)
@given(batches_and_sizes())
def test_joining_the_parts_gives_the_batch(case: tuple[Any, list[int]]) -> None:
    batch, sizes = case
    assert batch_size(batch) == sum(sizes)
    parts = split_batch(batch, sizes)
    assert [batch_size(part) for part in parts] == sizes
    joined = join_batches(parts)
    assert has_size(joined, sum(sizes))
    assert rows_of(joined) == rows_of(batch)
