from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum.devices.inspection import count_sample_bytes
from autoaccum.workload.spec import Workload

WIDTH, DEPTH = 256, 3


class Stack(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(DEPTH))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def make(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": Stack,
        "batch": lambda size: torch.randn(size, WIDTH),
        "loss": lambda model, batch: model(batch).mean(),
    }
    return Workload(**{**fields, **changes})


def test_counts_what_backward_needs() -> None:
    """A sigmoid keeps its output, which is also the next product's input; of a product's output nothing is kept."""
    workload = make()
    assert count_sample_bytes(workload, workload.build_model(), 2) == DEPTH * WIDTH * 4


def test_autocast_halves_it() -> None:
    workload = make(precision="bf16")
    found = count_sample_bytes(workload, workload.build_model(), 2)
    assert found is not None
    assert found == pytest.approx(DEPTH * WIDTH * 2, rel=0.4)


def test_a_model_that_does_not_bear_it_is_not_refused() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 4:
            raise ValueError("not four")
        return torch.as_tensor(model(batch).mean())

    workload = make(loss=loss)
    assert count_sample_bytes(workload, workload.build_model(), 2) is None
