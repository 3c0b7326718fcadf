"""Batches for live objects: any function of the size, or one sample batch, repeated and cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size


@dataclass
class Record:
    ids: Tensor
    name: str


def test_a_sample_is_repeated_and_cut() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    batches = make_batches((x, y))
    inputs, targets = batches(7)
    assert torch.equal(inputs, x[torch.arange(7) % 3])
    assert torch.equal(targets, torch.arange(7) % 3)
    assert batch_size(batches(2)) == 2
    assert batch_size(batches(3)) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
@pytest.mark.parametrize(
    "sample",
    [
        torch.ones(3, 2),
        [torch.ones(3, 2), torch.zeros(3)],
        {"ids": torch.ones(3, 4, dtype=torch.long), "scale": 2.0, "shape": (224, 224)},
        Record(torch.ones(3, 2), "x"),
        (np.ones((3, 2)), torch.zeros(3)),
        {"image": [torch.ones(2), torch.ones(3), torch.ones(4)], "label": torch.zeros(3)},
        (torch.ones(3, 2), ["a", "b", "c"]),
    ],
    ids=["tensor", "list", "dict", "dataclass", "array", "ragged", "strings"],
)
def test_every_form_has_the_size_asked_for(sample: Any, size: int) -> None:
    made = make_batches(sample)(size)
    assert type(made) is type(sample)
    assert batch_size(made) == size


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("form", ["tensor", "samples"])
def test_batches_have_memory_of_their_own(form: str, size: int) -> None:
    parts = [torch.ones(4) for _ in range(3)]
    sample: Any = torch.ones(3, 4) if form == "tensor" else {"image": parts, "label": torch.zeros(3)}
    made = make_batches(sample)(size)
    tensors = [made] if form == "tensor" else made["image"]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(addresses) == len(tensors)
    theirs = [sample] if form == "tensor" else parts
    assert not addresses & {tensor.untyped_storage().data_ptr() for tensor in theirs}
    for tensor in tensors:
        tensor.zero_()
    assert all(float(part.sum()) == 4 for part in parts)


def test_lambdas_and_closures_work() -> None:
    data = torch.arange(10)
    assert torch.equal(make_batches(lambda n: data[:n])(3), torch.arange(3))

    class Maker:
        def make(self, size: int) -> Tensor:
            return data[-size:]

    assert batch_size(make_batches(Maker().make)(4)) == 4


def test_what_the_function_raises_is_the_user_s() -> None:
    def failing(size: int) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(WorkloadError, match=r"batch\(5\) raised KeyError: 'labels'") as caught:
        make_batches(failing)(5)
    assert "in failing" in str(caught.value.user_traceback)
    assert "autoaccum" not in str(caught.value.user_traceback)


def test_another_size_is_refused_with_the_way_out() -> None:
    data = torch.arange(10)
    with pytest.raises(WorkloadError, match=r"batch\(64\) returned 10 samples: return as many as asked, or give one"):
        make_batches(lambda n: data[:n])(64)


def test_an_exhausted_iterator_is_told() -> None:
    loader = iter(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    batches = make_batches(lambda size: next(loader))
    batches(2)
    batches(2)
    with pytest.raises(WorkloadError, match=r"batch\(2\) raised StopIteration: its iterator has no more") as caught:
        batches(2)
    assert "next(loader)" in str(caught.value.user_traceback)


def test_running_out_of_memory_comes_as_it_is() -> None:
    def greedy(size: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        make_batches(greedy)(5)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (DataLoader(TensorDataset(torch.ones(4))), r"batch is a DataLoader: give one batch of it: next\(iter\(loader"),
        (iter([1, 2]), "batch is a list_iterator"),
        (torch.ones(0, 3), "the sample batch is empty"),
        (3, "nothing with a batch dimension"),
        ((torch.ones(2), torch.ones(3)), "has 3 rows"),
    ],
    ids=["loader", "iterator", "empty", "number", "uneven"],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make_batches(batch)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_gradient_reaches_a_sample_that_requires_one(size: int) -> None:
    """As of a gradient penalty: what depends on the inputs' gradient still finds inputs that require it."""
    inputs, scale = torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    make = make_batches((inputs, torch.ones(3, 2) * scale))
    for _ in range(2):
        batch = make(size)
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in batch)
        torch.autograd.backward([tensor.sum() for tensor in batch])
    assert inputs.grad is None
    assert scale.grad is None
