"""A step warns once of each thing that accumulation changes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from factories import CRITERION, labelled_rows, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD

from autoaccum import AccumulationWarning
from autoaccum.accumulation.accumulator import Accumulator


def test_batchnorm_is_named_once_and_only_for_several_parts() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=4)
    accumulator.step(labelled_rows(4))
    with pytest.warns(UserWarning, match="BatchNorm normalises by the micro-batch.* in 1: ") as caught:
        accumulator.step(labelled_rows(8))
    assert caught[0].filename == __file__
    accumulator.step(labelled_rows(8))
    model.eval()
    Accumulator(model, sgd(model), CRITERION, micro_batch=4).step(labelled_rows(8))


def test_a_batchnorm_that_is_added_or_put_into_training_mode_later_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 4)).double()
    accumulator = Accumulator(model, sgd(model), CRITERION, micro_batch=4)
    accumulator.step(labelled_rows(8))
    model[1].train()
    with pytest.warns(UserWarning, match=r"BatchNorm normalises by the micro-batch in 1: "):
        accumulator.step(labelled_rows(8))
    accumulator = Accumulator(model.eval(), sgd(model), CRITERION, micro_batch=4)
    accumulator.step(labelled_rows(8))
    model.append(nn.BatchNorm1d(4).double())
    with pytest.warns(UserWarning, match=r"BatchNorm normalises by the micro-batch in 3: "):
        accumulator.step(labelled_rows(8))


def make(model: nn.Module, micro_batch: int) -> Accumulator:
    return Accumulator(
        model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).square().mean(), micro_batch=micro_batch
    )


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))


def test_spectral_norm_in_training_mode_is_named_once() -> None:
    accumulator = make(spectral(), 2)
    with pytest.warns(UserWarning, match=r"buffers 0\.parametrizations\.weight\.0\._u and .*the full batch's") as seen:
        accumulator.step(torch.randn(4, 4))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(torch.randn(4, 4))


def test_one_part_or_eval_mode_raises_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(spectral(), 4).step(torch.randn(4, 4))
        make(spectral().eval(), 2).step(torch.randn(4, 4))


def test_a_table_that_is_replaced_does_not_count() -> None:
    class Growing(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.table = torch.zeros(2)
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(nn.Sequential(Growing(), nn.Linear(4, 4)), 2).step(torch.randn(4, 4))


MESSAGE = "the loss compares samples with each other"


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
def test_a_loss_that_compares_samples_is_warned_of_once(loss: Any) -> None:
    (message,) = warned(loss, 14, 7)
    assert message.startswith(MESSAGE)


@pytest.mark.parametrize(
    ("loss", "size", "micro_batch", "features"),
    [
        (by_sample, 14, 7, 24),
        (by_sample, 14, 7, 7),
        (in_batch_negatives, 7, 7, 24),
    ],
    ids=["a mean", "as many features as samples", "one part"],
)
def test_other_losses_raise_no_warning(loss: Any, size: int, micro_batch: int, features: int) -> None:
    assert warned(loss, size, micro_batch, features) == []


def test_a_loss_that_compares_too_few_samples_for_a_table_is_a_weighting_that_does_not_match() -> None:
    (message,) = warned(in_batch_negatives, 8, 4)
    assert message.startswith("the weighting does not match the loss (the loss of 4 samples is ")
    assert message.endswith(": no usual weight fits: run autoaccum verify to find the cause")
