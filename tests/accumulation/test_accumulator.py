"""Updates by the Accumulator are those of full batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import CRITERION, Classifier, assert_close, labelled_rows, sgd
from hypothesis import given
from hypothesis import strategies as st
from state_digests import state_digest
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.backpropagation import has_weight, make_loss_factors
from autoaccum.errors import UsageError, WorkloadError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.01 * i} for i, q in enumerate(p, 1)]),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_a_loop_over_full_batches_does(optimizer: str) -> None:
    model = Classifier().double()
    other = copy.deepcopy(model)
    mine, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](other.parameters())
    schedule, their_schedule = StepLR(mine, 2, 0.5), StepLR(theirs, 2, 0.5)
    accumulator = Accumulator(model, mine, CRITERION, micro_batch=3, clip_norm=0.1, scheduler=schedule)
    for size in (8, 8, 5, 8, 1):
        batch = labelled_rows(size)
        result = accumulator.step(batch)
        loss = CRITERION(other(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        theirs.step()
        their_schedule.step()
        theirs.zero_grad()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-10)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
        assert_close(model, other, 1e-8)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert schedule.get_last_lr() == their_schedule.get_last_lr()


def test_an_infinite_clip_norm_only_measures() -> None:
    model = Classifier().double()
    other = copy.deepcopy(model)
    batch = labelled_rows(8)
    result = Accumulator(model, sgd(model), CRITERION, micro_batch=3, clip_norm=math.inf).step(batch)
    Accumulator(other, sgd(other), CRITERION, micro_batch=3).step(batch)
    assert result.grad_norm is not None
    assert result.grad_norm > 0
    assert_close(model, other, 0.0)


def test_frozen_and_foreign_parameters() -> None:
    model = Classifier().double()
    model.first.weight.requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD([model.last.weight], lr=1.0)
    Accumulator(model, optimizer, CRITERION, micro_batch=3).step(labelled_rows(8))
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)) == (name != "last.weight")


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.out(self.tokens(tokens).flatten(1)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients() -> None:
    model = Bag().double()
    other = copy.deepcopy(model)
    tokens, y = torch.randint(0, 10, (8, 2)), torch.randint(0, 3, (8,))
    optimizer = sgd(model)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=3, clip_norm=0.1)
    result = accumulator.step((tokens, y))
    torch.autograd.backward(CRITERION(other(tokens), y))
    weight = other.tokens.weight
    assert weight.grad is not None
    weight.grad = weight.grad.to_dense()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    sgd(other).step()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
    assert_close(model, other)


def test_the_ceiling_can_be_set_and_is_checked() -> None:
    model = Classifier().double()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=3)
    accumulator.micro_batch = 4
    assert accumulator.step(labelled_rows(8)).micro_batches == (4, 4)
    with pytest.raises(UsageError, match="micro_batch is 0"):
        accumulator.micro_batch = 0


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    model = Classifier().double()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=2)
    with torch.inference_mode(), pytest.raises(UsageError, match=r"within torch\.inference_mode\(\)"):
        accumulator.step(labelled_rows(4))
    with torch.no_grad():
        assert accumulator.step(labelled_rows(4)).updated


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32])
def test_frozen_parameters_may_have_any_dtype(dtype: torch.dtype) -> None:
    model = Classifier().double()
    model.table = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert Accumulator(model, optimizer, CRITERION, micro_batch=2).step(labelled_rows(4)).updated


class Forbidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("forward must not run")


def test_nothing_is_updated_without_any_weight() -> None:
    model = Forbidden()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=2, scheduler=scheduler, clip_norm=1.0)
    batch = (torch.randn(4, 5), torch.full((4,), -100))
    before = state_digest(model, optimizer)
    result = accumulator.step(batch)
    assert (result.updated, result.samples, result.micro_batches) == (False, 4, (2, 2))
    assert math.isnan(result.loss)
    assert state_digest(model, optimizer) == before
    assert scheduler.get_last_lr() == [1.0]


def test_a_term_without_weight_is_left_out_and_reported_as_such() -> None:
    model = Classifier().double()

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"a": CRITERION(model(batch[0]), batch[1]), "b": model(batch[0]).sum() * math.nan}

    accumulator = Accumulator(model, sgd(model), loss, micro_batch=3, weight=lambda b: {"a": len(b[0]), "b": 0})
    result = accumulator.step(labelled_rows(8))
    assert result.updated
    assert result.loss == result.terms["a"]
    assert math.isfinite(result.loss)
    assert math.isnan(result.terms["b"])
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_the_factors_of_a_mean_add_up_to_one(weights: list[int]) -> None:
    factors = make_loss_factors([float(weight) for weight in weights], "mean")
    numbers = [factor for factor in factors if not isinstance(factor, dict)]
    assert sum(numbers) == pytest.approx(1.0 if any(weights) else 0.0)
    assert [has_weight(factor) for factor in numbers] == [weight > 0 for weight in weights]


def test_each_term_has_factors_of_its_own() -> None:
    factors = make_loss_factors([{"a": 1.0, "b": 0.0}, {"b": 0.0, "a": 3.0}, {"a": 0.0, "b": 0.0}], "mean")
    assert factors == ({"a": 0.25, "b": 0.0}, {"a": 0.75, "b": 0.0}, {"a": 0.0, "b": 0.0})
    assert [has_weight(part) for part in factors] == [True, True, False]


def test_weights_of_different_kinds_are_refused() -> None:
    with pytest.raises(WorkloadError, match="a number for some parts"):
        make_loss_factors([1.0, {"a": 1.0}], "mean")
    with pytest.raises(WorkloadError, match="terms a, weight has b"):
        make_loss_factors([{"a": 1.0}, {"b": 1.0}], "mean")
