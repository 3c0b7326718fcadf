"""What has no weight takes no part."""

from __future__ import annotations

import math
from typing import Any

import torch
from small_training import CRITERION, batch_of, net, sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.changes import state_digest


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
    model = net()

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"a": CRITERION(model(batch[0]), batch[1]), "b": model(batch[0]).sum() * math.nan}

    accumulator = Accumulator(model, sgd(model), loss, micro_batch=3, weight=lambda b: {"a": len(b[0]), "b": 0})
    result = accumulator.step(batch_of(8))
    assert result.updated
    assert result.loss == result.terms["a"]
    assert math.isfinite(result.loss)
    assert math.isnan(result.terms["b"])
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_loss_that_diverged_is_reported_as_it_is() -> None:
    model = net()
    result = Accumulator(model, sgd(model), lambda m, b: m(b[0]).sum() * math.nan, micro_batch=3).step(batch_of(8))
    assert math.isnan(result.loss)
    assert result.updated
