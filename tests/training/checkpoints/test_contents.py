"""What a checkpoint holds comes back as it was, and what needs code to load is named."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_records import record, same
from torch import Tensor

from autoaccum.training.checkpoints.checkpoints import (
    VERSION,
    read_checkpoint,
    write_checkpoint,
)
from autoaccum.training.checkpoints.contents import NotPortableError, digest

# Round trips.

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
tensors = st.builds(
    lambda seed, shape, dtype: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.integers(0, 99),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
values = st.one_of(
    keys,
    st.floats(),
    st.complex_numbers(),
    st.binary(min_size=1, max_size=5),
    st.sampled_from([*DTYPES, torch.device("cuda:1"), torch.Size([2, 3])]),
    tensors,
)
nests = st.recursive(
    values,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.sets(keys, max_size=3),
    ),
    max_leaves=12,
)


def equal(one: Any, other: Any) -> bool:
    """Without the digest, which is under test."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other or repr(one) == repr(other)  # NaN.


@given(nests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nest_comes_back(tmp_path: Path, nest: Any) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, {"nest": nest})
    assert equal(read_checkpoint(path)["nest"], nest)


@given(nests, nests)
@settings(max_examples=100, deadline=None)
def test_different_nests_have_different_digests(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == equal(one, other)


def test_anybody_can_load_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    write_checkpoint(path, record(7))
    content = torch.load(path, weights_only=True)
    assert (content["format"], content["version"]) == ("autoaccum checkpoint", VERSION)
    assert same(content["record"], record(7))
    model = read_checkpoint(path)["model"]
    assert model["weight"] is model["tied"]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_tensors_are_made_plain(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    big = torch.arange(100_000.0)
    odd = {
        "slice": big[5:8],
        "wide": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
    }
    write_checkpoint(path, {**odd, "keys": {np.int64(3): 1}, "groups": defaultdict(list, a=[1])})
    read = read_checkpoint(path)
    for name, tensor in odd.items():
        assert torch.equal(read[name].to_dense(), tensor.detach().to_dense().resolve_conj())
    assert [type(key) for key in read["keys"]] == [int]
    assert read["groups"] == {"a": [1]}
    assert path.stat().st_size < 20_000


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    numbers = [np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.float16(2)]
    arrays: list[Any] = [
        np.arange(6.0, dtype=np.float32).reshape(2, 3).T,
        np.zeros(()),
        np.ones(0, np.int8),
        np.eye(2) > 0,
    ]
    arrays[0].flags.writeable = False
    write_checkpoint(path, {"numbers": tuple(numbers), "arrays": arrays})
    read = read_checkpoint(path)
    assert read["numbers"] == tuple(numbers)
    assert [type(number) for number in read["numbers"]] == [type(number) for number in numbers]
    for array, other in zip(read["arrays"], arrays, strict=True):
        assert (type(array), array.dtype, array.shape) == (np.ndarray, other.dtype, other.shape)
        assert np.array_equal(array, other)
    assert torch.load(path, weights_only=True)["record"]["arrays"][1] == {
        "__numpy__": "array",
        "values": torch.zeros(()),
    }


Pair = namedtuple("Pair", "x y")  # noqa: PYI024

LOOP: list[Any] = []
LOOP.append(LOOP)

NOT_PORTABLE: dict[str, tuple[Any, str]] = {
    "function": ({"scheduler": {"anneal_func": math.cos}}, "scheduler.anneal_func: it is a builtin_function_or_method"),
    "array": ({"data": [1, np.array(["a"])]}, "data.1: it is a ndarray"),
    "object": ({"data": random.Random()}, "data: it is a Random"),
    "named": ({"data": Pair(1, 2)}, "data: it is a Pair"),
    "key": ({"data": {Pair(1, 2): 1}}, "a key of data: it is a Pair"),
    "empty": ({"data": b""}, "data: it is a bytes"),
    "loop": ({"data": LOOP}, "it is a nest that contains itself"),
    "meta": ({"data": torch.ones(1, device="meta")}, "data: it is a tensor on the meta device"),
}


@pytest.mark.parametrize("kind", NOT_PORTABLE)
def test_what_needs_code_is_named_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
    content, said = NOT_PORTABLE[kind]
    with pytest.raises(NotPortableError, match="which would not load without running code: keep") as caught:
        write_checkpoint(tmp_path / "checkpoint-00000001.pt", content)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
