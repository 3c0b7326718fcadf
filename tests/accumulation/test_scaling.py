from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from autoaccum.accumulation.gradients import choose_scaler, rewind_scaler
from autoaccum.errors import UsageError

CPU = torch.device("cpu")


def used_scaler() -> tuple[GradScaler, torch.optim.Optimizer, nn.Linear]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return scaler, optimizer, model


def backward(scaler: GradScaler, model: nn.Linear) -> None:
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 2)).sum()))


def test_an_unscaled_optimizer_can_be_unscaled_again() -> None:
    scaler, optimizer, model = used_scaler()
    for _ in range(3):
        backward(scaler, model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = scaler.state_dict()
    backward(scaler, model)
    scaler.unscale_(optimizer)
    rewind_scaler(scaler, state)
    assert scaler.state_dict() == state
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_load_state_dict_alone_would_not_do() -> None:
    scaler, optimizer, model = used_scaler()
    backward(scaler, model)
    scaler.unscale_(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_a_scaler_that_was_never_used_stays_usable() -> None:
    scaler, optimizer, model = used_scaler()
    state = scaler.state_dict()
    rewind_scaler(scaler, state)
    assert scaler.state_dict() == state
    backward(scaler, model)
    scaler.step(optimizer)


def test_fp16_gets_a_scaler_and_nothing_else_does() -> None:
    parameters = [torch.ones(1)]
    assert choose_scaler("fp32", None, CPU, parameters) is None
    assert choose_scaler("bf16", None, CPU, parameters) is None
    assert isinstance(choose_scaler("fp16", None, CPU, parameters), GradScaler)
    given = GradScaler("cpu")
    assert choose_scaler("bf16", given, CPU, parameters) is given
    assert choose_scaler("fp16", GradScaler("cpu", enabled=False), CPU, parameters) is None
    with pytest.raises(UsageError, match="parameters are of bfloat16"):
        choose_scaler("fp16", None, CPU, [torch.ones(1).bfloat16()])
