"""Copies of modules that hold what a forward has computed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

import autoaccum
from autoaccum.workload.nests import copy_module
from autoaccum.workload.spec import Workload


class Watched(nn.Module):
    """Keeps its attention and an auxiliary loss, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).softmax(-1)
        self.attention, self.seen = hidden, [hidden.square().mean()]
        return torch.as_tensor(self.second(hidden))


def test_what_a_forward_has_left_comes_without_its_graph() -> None:
    model = Watched()
    model(torch.ones(2, 4))
    made = copy_module(model)
    assert made.attention.grad_fn is None
    assert torch.equal(made.attention, model.attention)
    assert made.seen[0].grad_fn is None
    assert model.attention.grad_fn is not None


@pytest.mark.parametrize("normed", [False, True], ids=["attention", "weight_norm"])
def test_a_live_model_is_verified_after_it_has_run(normed: bool) -> None:
    model: nn.Module = Watched()
    if normed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = nn.Sequential(weight_norm(nn.Linear(4, 1)))
    model(torch.ones(2, 4))
    batch = torch.randn(7, 4), torch.randn(7, 1)
    assert autoaccum.verify(model=model, batch=batch, loss=nn.MSELoss(), target_batch=7, micro_batch=3).equivalent
    assert Workload(model=model, batch=lambda size: batch, loss=nn.MSELoss()).build_model() is not model
