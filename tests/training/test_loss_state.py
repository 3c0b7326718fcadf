"""The state of a loss is found and resumed: learnt weights, bound modules, partials, closures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_fit import fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset

UPDATES = 6
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X[:, :2] * 2)


class Weighted(nn.Module):
    """Learns a weight and counts its calls in a buffer, which is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        errors = (outputs - targets).pow(2).mean(0) * torch.exp(-self.weight) + self.weight
        loss: Tensor = errors.sum() * scale * (1 + self.calls / 100)
        return loss

    def compute(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = self(model(batch[0]), batch[1])
        return loss


def alone(weight: Tensor) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        errors: Tensor = (model(batch[0]) - batch[1]).pow(2).mean(0)
        return (errors * torch.exp(-weight) + weight).sum()

    return loss


WAYS: dict[str, Callable[[Weighted], dict[str, Any]]] = {
    "only in the optimizer": lambda weighted: {"loss": alone(weighted.weight)},
    "a bound method": lambda weighted: {"loss": weighted.compute},
    "a partial": lambda weighted: {"criterion": functools.partial(weighted, scale=0.5)},
    "a closure": lambda weighted: {"loss": lambda model, batch: weighted(model(batch[0]), batch[1])},
}


def run(folder: Path, way: str, steps: int = UPDATES) -> dict[str, Any]:
    torch.manual_seed(0)
    model, weighted = nn.Linear(3, 2), Weighted()
    optimizer = torch.optim.SGD([*model.parameters(), weighted.weight], lr=0.1, momentum=0.9)
    result, _ = fit(model, DATA, run_dir=folder, optimizer=optimizer, steps=steps, **WAYS[way](weighted))
    assert result.updates == steps
    assert result.warnings == ()
    return {"model": model.state_dict(), "weighted": weighted.state_dict()}


@pytest.mark.parametrize("way", WAYS)
def test_the_state_of_a_loss_is_resumed(tmp_path: Path, way: str) -> None:
    whole = run(tmp_path / "whole", way)
    run(tmp_path / "parts", way, 3)
    resumed = run(tmp_path / "parts", way)
    assert whole["weighted"]["weight"].any()
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
