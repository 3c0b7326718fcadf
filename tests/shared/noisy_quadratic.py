"""A workload whose best learning rate can be computed: SGD on a quadratic with noisy samples.

A sample x of N(0, 1) in 100 dimensions has the loss 1/2 (w - x)' H (w - x) with a diagonal H, so that an update with
n samples of mean m is w <- w - rate H (w - m), and m is of N(0, 1/n). Each w_i has a mean and a variance in closed
form (as in Zhang et al. 2019, arXiv 1907.04164, section 3). The held-out sample is the samples' expectation, 0: the
loss there is 1/2 w' H w.

autoaccum tune tests/shared/noisy_quadratic.py --target-batch 8 --budget-samples 512
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, TARGET_BATCH, BUDGET, OWN_RATE = 100, 8, 512, 0.02
UPDATES = BUDGET // TARGET_BATCH
CURVATURES = torch.logspace(math.log10(0.2), math.log10(2.0), WIDTH, dtype=torch.float64)
H = CURVATURES.float()

samples = torch.randn(32768, WIDTH, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(samples)
evaluation_dataset = TensorDataset(torch.zeros(1, WIDTH))


class Point(nn.Module):
    """A single vector of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w - x


def model() -> nn.Module:
    return Point()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    apart: torch.Tensor = model(batch[0])
    return 0.5 * (apart * H * apart).sum(1).mean()


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=OWN_RATE)


def expected_loss(rate: float, updates: int = UPDATES, target_batch: int = TARGET_BATCH) -> float:
    """Return the expected held-out loss after some updates."""
    decay = (1 - rate * CURVATURES).square()  # Of a variance, per update.
    added = (rate * CURVATURES).square() / target_batch
    history = decay[None] ** torch.arange(updates, dtype=torch.float64)[:, None]  # [updates, WIDTH]
    square: torch.Tensor = decay**updates + added * history.sum(0)
    return float(0.5 * (CURVATURES * square).sum())


def best_rate() -> float:
    """Return the learning rate with the lowest expected loss, to a thousandth."""
    rates: list[float] = torch.logspace(-4, 0, 9211, dtype=torch.float64).tolist()
    return min(rates, key=expected_loss)
