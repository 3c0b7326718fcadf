"""Copies of what is verified: all alike, in the precision asked for, and nothing of them the original's."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Workload
from autoaccum.errors import WorkloadError
from autoaccum.verification.fixture import Fixture, in_float64, widened


class Tied(nn.Module):
    """A head tied to its embedding, a table in a plain attribute, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.table = torch.arange(3.0)
        self.angles = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))


def make(model: Any = Tied, **fields: Any) -> Workload:
    chosen: dict[str, Any] = {"batch": lambda size: torch.zeros(size, dtype=torch.int64), "loss": lambda m, b: m(b)}
    return Workload(model=model, **{**chosen, **fields})


def test_ties_attributes_and_complex_numbers_survive_widening() -> None:
    model = Fixture(make()).fresh()[0]
    assert isinstance(model, Tied)
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.dtype == model.table.dtype == torch.float64
    assert model.angles.dtype == model.turns.dtype == torch.complex128


def test_a_criterion_is_widened_with_its_class_weights() -> None:
    weights = torch.tensor([1.0, 2.0])
    module = nn.CrossEntropyLoss(weight=weights)
    for criterion in (module, functools.partial(F.cross_entropy, weight=weights)):
        workload = make(lambda: nn.Linear(2, 2), loss=None, criterion=criterion, batch=lambda size: None)
        found = Fixture(workload).fresh()[1].criterion
        assert found is not None
        function: Any = found.function
        inner = function.weight if isinstance(function, nn.Module) else function.keywords["weight"]
        assert isinstance(inner, Tensor)
        assert inner.dtype == torch.float64
    assert weights.dtype == torch.float32


def test_a_compiled_model_is_verified_as_written() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    fixture = Fixture(make(lambda: compiled))
    model, _ = fixture.fresh()
    assert type(model) is nn.Linear
    with fixture.running():
        assert model(torch.ones(1, 2)).dtype == torch.float64


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.lock = threading.Lock()


def test_what_cannot_be_copied_is_reported() -> None:
    with pytest.raises(WorkloadError, match="the model, a Locked, cannot be copied"):
        Fixture(make(Locked))


def test_hooks_on_gradients_come_along() -> None:
    model = nn.Linear(2, 2)
    seen: list[Tensor] = []
    model.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    model.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    for _ in range(2):
        copied = Fixture(make(lambda: model)).fresh()[0]
        torch.autograd.backward(copied(torch.ones(1, 2, dtype=torch.float64)).sum())
        assert isinstance(copied.weight, Tensor)
        assert copied.weight.grad is not None
        assert torch.equal(copied.weight.grad, torch.full((2, 2), 2.0, dtype=torch.float64))
        assert seen[-1] is copied.weight


TEACHER = nn.Linear(3, 2)
WEIGHTS = torch.tensor([1.0, 2.0])


def distil(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (WEIGHTS * (model(batch[0]) - TEACHER(batch[0]))).square().mean()
    return loss


def test_what_a_loss_names_stands_in_float64_and_is_put_back() -> None:
    teacher, weights, values = TEACHER, WEIGHTS, TEACHER.weight.detach().clone()
    fixture = Fixture(make(lambda: nn.Linear(3, 2), loss=distil))
    inputs = fixture.prepare_batch([torch.ones(4, 3)])
    for _ in range(2):
        with fixture.running():
            assert (WEIGHTS.dtype, TEACHER.weight.dtype) == (torch.float32, torch.float64)
            model, _ = fixture.fresh()
            assert distil(model, inputs).dtype == torch.float64
            with torch.no_grad():
                TEACHER.weight.zero_()
        assert torch.equal(TEACHER.weight, values)
    assert WEIGHTS is weights
    assert TEACHER is teacher
    with Fixture(make(lambda: nn.Linear(3, 2), loss=distil), precision="fp32").running():
        assert TEACHER.weight.dtype == torch.float32


class Narrowing(nn.Module):
    """Computes as transformers do: norms and logits in float32, masks made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = inputs.to(torch.float32) * torch.rsqrt(inputs.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        mask = torch.zeros(3, dtype=torch.float32, device=inputs.device)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.linear(normed.type_as(inputs)) + mask + torch.ones(3)
        probabilities: Tensor = logits.float().softmax(-1, dtype=torch.float32)
        return probabilities


def test_nothing_is_rounded_on_the_way() -> None:
    torch.manual_seed(0)
    model, inputs = Narrowing().double(), torch.randn(4, 3, dtype=torch.float64)
    with in_float64():
        found = model(inputs)
    normed = inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = (nn.functional.linear(normed, model.linear.weight, model.linear.bias) + 1).softmax(-1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)


def test_a_nest_is_widened_without_touching_it() -> None:
    more = [torch.ones(2, dtype=torch.bfloat16), "text"]
    batch: dict[str, Any] = {"x": torch.ones(2), "ids": torch.arange(2), "more": more}
    wide = widened(batch)
    assert [wide["x"].dtype, wide["ids"].dtype, wide["more"][0].dtype] == [torch.float64, torch.int64, torch.float64]
    assert wide["more"][1] == "text"
    assert batch["x"].dtype == torch.float32
    assert widened(np.ones(2)).dtype == np.float64
