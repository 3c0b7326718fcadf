"""Verification on a card: equal under the card's own draws and kernels, causes found, running statistics right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import Accumulator, Workload
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.api import verify

WIDTH, LENGTH = 16, 6


class Attention(nn.Module):
    """Dropout within a fused attention, whose kernel keeps its mask to itself, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = inputs.view(len(inputs), LENGTH, 4, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True)
        outputs: Tensor = self.block(mixed.transpose(1, 2).flatten(2))
        return outputs.mean(1)


class Recurrent(nn.Module):
    """Dropout between the layers of a recurrent net, within cuDNN where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.rnn(inputs)[0].mean(1)
        return outputs


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH * LENGTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, WIDTH))


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, LENGTH, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


def make(model: Callable[[], nn.Module]) -> Workload:
    return Workload(model=model, batch=batch, criterion=nn.MSELoss())


@pytest.mark.slow
@pytest.mark.parametrize("model", [Attention, Recurrent], ids=["attention", "recurrent"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_dropout_in_any_kernel_is_equivalent(place: torch.device, model: Any, precision: str) -> None:
    found = verify(make(model), device=str(place), precision=precision)
    assert found.equivalent, found.to_json()
    assert found.device == str(place)


def test_batchnorm_is_found(place: torch.device) -> None:
    found = verify(make(normed), device=str(place))
    assert [cause.kind for cause in found.causes] == ["batchnorm"]
    assert verify(make(normed), device=str(place), batchnorm="frozen").equivalent


@pytest.mark.filterwarnings(f"ignore::{AccumulationWarning.__module__}.{AccumulationWarning.__name__}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_running_statistics_are_the_full_batchs(place: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [normed().to(place, dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    pair = tuple(tensor.to(place, dtype) for tensor in batch(14))
    models[0](pair[0])
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    Accumulator(models[1], optimizer, nn.MSELoss(), micro_batch=5, batchnorm="running").step(pair)
    for (name, wanted), seen in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        bound = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(seen, wanted, rtol=bound, atol=bound, msg=name)
