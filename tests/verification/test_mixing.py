"""Draws that mix samples, and draws that only lie in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Workload
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.runs import draws_mix


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(F.dropout(self.norm(self.first(inputs)), 0.4))
        return outputs


class Sorted(Net):
    """Puts the batch in order of a length, drops, and puts it back."""

    def forward(self, inputs: Tensor) -> Tensor:
        order = (inputs > 0).sum(1).argsort(stable=True)
        outputs: Tensor = super().forward(inputs[order])[order.argsort()]
        return outputs


class Mixed(Net):
    """Gives each sample a random partner."""

    def forward(self, inputs: Tensor) -> Tensor:
        partners = torch.rand(len(inputs)).argsort()
        outputs: Tensor = super().forward(0.7 * inputs + 0.3 * inputs[partners])
        return outputs


class Flat(Net):
    """Returns no dimension of samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).mean()


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, generator=generator), torch.arange(size) % 3


def loss(model: nn.Module, pair: Any) -> Tensor:
    return model(pair[0]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "mixes"), [(Net, False), (Sorted, False), (Mixed, True), (Flat, None)])
def test_mixing_is_told_from_order(model: type[nn.Module], mixes: bool | None) -> None:
    fixture = Fixture(Workload(model=model, batch=batch, loss=loss))
    assert draws_mix(fixture, fixture.prepare_batch(batch(8))) is mixes


def test_mixing_before_the_model_is_seen_too() -> None:
    def mixing(model: nn.Module, pair: Any) -> Tensor:
        partners = torch.randperm(len(pair[0]))
        return F.cross_entropy(model(pair[0] + pair[0][partners]), pair[1])

    fixture = Fixture(Workload(model=Net, batch=batch, loss=mixing))
    assert draws_mix(fixture, fixture.prepare_batch(batch(8))) is True


def test_a_few_samples_tell_nothing() -> None:
    fixture = Fixture(Workload(model=Net, batch=batch, loss=loss))
    assert draws_mix(fixture, fixture.prepare_batch(batch(3))) is None
