"""Live objects as a Workload: what is refused, batches of any size, and tensors on a card that wait on the host."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from factories import Classifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.devices.live_objects import LiveTensors, make_batches, workload_of_objects
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import make_options
from autoaccum.sources.batches import batch_size
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.workload import Workload


def live(model: Any, **given: Any) -> Workload:
    optimizer = given.pop("optimizer", None)
    sample = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    return workload_of_objects({"model": model, "batch": sample, **given}, make_options(optimizer=optimizer))


@pytest.mark.parametrize("model", [3, nn.DataParallel(nn.Linear(2, 2)), nn.LazyLinear(2)])
def test_a_model_that_is_no_bare_module_is_refused(model: Any) -> None:
    with pytest.raises(UsageError):
        live(model, criterion=nn.CrossEntropyLoss())


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError):
        live(nn.Linear(2, 2), criterion=nn.CrossEntropyLoss(), optimizer=optimizer)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "given",
    [
        {"loss": cross_entropy, "weight": len},
        {"loss": cross_entropy, "reduction": "sum"},
        {"criterion": nn.CrossEntropyLoss(ignore_index=1)},
        {"loss": nn.functional.mse_loss},
        {"loss": functools.partial(nn.functional.cross_entropy, reduction="sum")},
    ],
)
def test_the_loss_is_that_of_the_objects(given: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    made = live(model, **given)
    assert made.objective == resolve_objective(**given)
    assert made.model is model


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


@pytest.mark.parametrize("size", [1, 3, 8])
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


def test_another_size_is_refused_with_the_way_out() -> None:
    data = torch.arange(10)
    with pytest.raises(WorkloadError, match=r"batch\(64\) returned 10 samples: return as many as asked, or give one"):
        make_batches(lambda n: data[:n])(64)


def test_an_exhausted_iterator_is_reported() -> None:
    loader = iter(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    batches = make_batches(lambda size: next(loader))
    batches(2)
    batches(2)
    with pytest.raises(WorkloadError, match=r"batch\(2\) raised StopIteration: its iterator has no more") as caught:
        batches(2)
    assert "next(loader)" in str(caught.value.user_traceback)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (DataLoader(TensorDataset(torch.ones(4))), r"batch is a DataLoader: give one batch of it: next\(iter\(loader"),
        (iter([1, 2]), "batch is a list_iterator"),
        (torch.ones(0, 3), "the sample batch is empty"),
        (3, "nothing with a batch dimension"),
        ((torch.ones(2), torch.ones(3)), "has the length 3"),
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


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tied weights, gradients and optimizer state, and a buffer that cannot be resized."""
    model: Any = nn.Sequential(Classifier(norm=True), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model.register_buffer("shared", torch.ones(3).share_memory_())  # type: ignore[no-untyped-call]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def sizes(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_everything_is_freed_and_comes_back(end: type[BaseException] | None) -> None:
    model, optimizer = trained()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [buffer for name, buffer in model.named_buffers() if name != "shared"]
    held: list[Tensor] = [*model.parameters(), *own, *gradients, *state]
    held.append(next(model.parameters()).detach()[:2])  # A view of the caller's.
    before = [tensor.detach().clone() for tensor in held]
    ended = False
    try:
        with LiveTensors.of(model, optimizer).on_host():
            assert sizes(held) == {0}
            if end is not None:
                raise end
    except (ValueError, KeyboardInterrupt):
        ended = True
    assert ended == (end is not None)
    assert all(map(torch.equal, held, before))
    assert model[2].weight is model[1].weight  # type: ignore[index]
