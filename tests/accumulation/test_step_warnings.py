"""What a step warns of, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from small_training import CRITERION, batch_of, sgd
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator


def counting_model() -> Iterator[nn.Module]:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.as_tensor(self.layer(x))

    yield Counting().double()


def test_state_kept_in_python_is_named_once() -> None:
    model = next(counting_model())
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=3)
    with pytest.warns(UserWarning, match=r"Python attributes \(calls\)") as caught:
        accumulator.step(batch_of(8))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(batch_of(8))


def test_what_forward_computes_anew_is_no_state() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = nn.Linear(5, 3), None

        def forward(self, x: Tensor) -> Tensor:
            self.gate = torch.sigmoid(self.layer(x))  # type: ignore[assignment]
            return torch.as_tensor(self.gate * self.layer(x))

    model = Gated().double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accumulator(model, sgd(model), CRITERION, micro_batch=3).step(batch_of(8))


def test_batchnorm_is_named_once_and_only_where_it_matters() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=4)
    accumulator.step(batch_of(4))
    with pytest.warns(UserWarning, match="BatchNorm normalises by the micro-batch.* in 1: ") as caught:
        accumulator.step(batch_of(8))
    assert caught[0].filename == __file__
    accumulator.step(batch_of(8))
    model.eval()
    Accumulator(model, sgd(model), CRITERION, micro_batch=4).step(batch_of(8))
