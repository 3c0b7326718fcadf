"""Tables of samples by samples, seen on the way from a loss to the model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from autoaccum import AccumulationWarning, Accumulator

SAYS = "the loss compares samples with each other"


def in_batch_negatives(model: nn.Module, batch: Tensor) -> Tensor:
    one, other = model(batch).chunk(2, dim=1)
    return F.cross_entropy(one @ other.T, torch.arange(len(batch)))


def two_views(model: nn.Module, batch: Tensor) -> Tensor:
    views = F.normalize(model(torch.cat([batch, batch + 0.1])), dim=1)
    table = (views @ views.T).fill_diagonal_(-9)
    return F.cross_entropy(table, torch.arange(len(views)).roll(len(batch)))


def by_sample(model: nn.Module, batch: Tensor) -> Tensor:
    outputs: Tensor = model(batch)
    return outputs.square().mean()


def warned(loss: Any, size: int, micro_batch: int, features: int = 24) -> list[str]:
    model = nn.Linear(3, features)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), loss, micro_batch=micro_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AccumulationWarning)
        for _ in range(2):
            accumulator.step(torch.randn(size, 3))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("loss", [in_batch_negatives, two_views])
def test_an_accumulator_tells_once_of_samples_that_are_compared(loss: Any) -> None:
    (said,) = warned(loss, 14, 7)
    assert said.startswith(SAYS)


@pytest.mark.parametrize(
    ("loss", "size", "micro_batch", "features"),
    [
        (by_sample, 14, 7, 24),
        (by_sample, 14, 7, 7),
        (in_batch_negatives, 7, 7, 24),
        (in_batch_negatives, 8, 4, 24),
    ],
    ids=["a mean", "as many features as samples", "one part", "too few to tell"],
)
def test_nothing_is_told_of_others(loss: Any, size: int, micro_batch: int, features: int) -> None:
    assert warned(loss, size, micro_batch, features) == []
