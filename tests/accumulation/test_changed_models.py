"""An Accumulator sees what was changed in its model between two updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import CRITERION, Classifier, assert_close, labelled_rows, sgd
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator


class Counted(nn.Module):
    calls: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.as_tensor(self.inner(x) * self.scale)


def unfreeze(model: Classifier, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.requires_grad_(True)


def freeze(model: Classifier, optimizer: torch.optim.Optimizer) -> None:
    model.last.weight.requires_grad_(False)


def add_module(model: Classifier, optimizer: torch.optim.Optimizer) -> None:
    model.last = Counted(model.last)  # type: ignore[assignment]
    optimizer.add_param_group({"params": [model.last.scale]})


def replace_parameter(model: Classifier, optimizer: torch.optim.Optimizer) -> None:
    new = nn.Parameter(torch.randn_like(model.last.weight))
    optimizer.param_groups[0]["params"][2] = model.last.weight = new


def remove_bias(model: Classifier, optimizer: torch.optim.Optimizer) -> None:
    model.last.bias = None  # type: ignore[assignment]
    del optimizer.param_groups[0]["params"][3]


CHANGES = pytest.mark.parametrize("change", [unfreeze, freeze, add_module, replace_parameter, remove_bias])


def changed_after_two_updates(
    change: Callable[[Any, Any], None],
) -> tuple[Classifier, torch.optim.Optimizer, Accumulator]:
    model = Classifier().double()
    model.first.weight.requires_grad_(False)
    optimizer = sgd(model)
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=3)
    for _ in range(2):
        accumulator.step(labelled_rows(8))
    change(model, optimizer)
    return model, optimizer, accumulator


@CHANGES
def test_a_model_changed_between_updates_is_trained_as_it_is(change: Callable[[Any, Any], None]) -> None:
    model, optimizer, accumulator = changed_after_two_updates(change)
    other, batch = copy.deepcopy(model), labelled_rows(8)
    accumulator.step(batch)
    CRITERION(other(batch[0]), batch[1]).backward()
    sgd(other).step()
    assert_close(model, other)
    assert all(parameter.grad is None for parameter in model.parameters())


@CHANGES
def test_a_model_changed_between_updates_is_restored_as_it_was(change: Callable[[Any, Any], None]) -> None:
    model, optimizer, accumulator = changed_after_two_updates(change)
    calls: list[None] = []

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("enough")

    model.register_forward_hook(fail)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    batch = labelled_rows(8)
    before = state_digest(model, optimizer)
    with pytest.raises(ValueError, match="enough"):
        accumulator.step(batch)
    assert state_digest(model, optimizer) == before
