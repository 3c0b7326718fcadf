"""A GAN's loop: two optimizers, two Accumulators, and each update is the full batch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_training import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Accumulator

Nets = dict[str, nn.Module]


def networks() -> Nets:
    torch.manual_seed(0)
    painter = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    return {"critic": critic.double(), "painter": painter.double()}


def losses(nets: Nets) -> dict[str, Any]:
    def tells_apart(critic: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, noise = batch
        return F.softplus(-critic(real)).mean() + F.softplus(critic(nets["painter"](noise))).mean()

    def deceives(painter: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.softplus(-nets["critic"](painter(batch[1]))).mean()

    return {"critic": tells_apart, "painter": deceives}


def optimizers(nets: Nets) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(net.parameters(), lr=0.05) for name, net in nets.items()}


def test_each_update_is_the_full_batch_s() -> None:
    nets = networks()
    whole: Nets = copy.deepcopy(nets)
    steps = {
        name: Accumulator(nets[name], optimizer, losses(nets)[name], micro_batch=size)
        for (name, optimizer), size in zip(optimizers(nets).items(), (4, 3), strict=True)
    }
    expected, adams = losses(whole), optimizers(whole)
    for _ in range(4):
        for name in nets:
            batch = torch.randn(10, 5, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
            other = next(net for key, net in nets.items() if key != name)
            before = [parameter.detach().clone() for parameter in other.parameters()]
            marks = [torch.full_like(parameter, 7.0) for parameter in other.parameters()]
            nets[name].requires_grad_(True)  # As the loop of examples/gan.py does.
            other.requires_grad_(False)
            for parameter, mark in zip(other.parameters(), marks, strict=True):
                parameter.grad = mark
            result = steps[name].step(batch)
            assert result.updated
            assert len(result.micro_batches) > 2
            for parameter, value, mark in zip(other.parameters(), before, marks, strict=True):
                assert torch.equal(parameter, value)
                assert parameter.grad is mark
            adams[name].zero_grad()
            loss = expected[name](whole[name], batch)
            assert result.loss == pytest.approx(float(loss.detach()), rel=1e-12)
            torch.autograd.backward(loss)
            adams[name].step()
            for key in nets:
                assert_close(nets[key], whole[key], 1e-12)
