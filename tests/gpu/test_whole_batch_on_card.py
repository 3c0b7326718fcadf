"""Parts that need the whole batch, on a card: gradients are the full batch's, and the card holds one part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator

pytestmark = pytest.mark.gpu
CHANNELS, SIDE, SAMPLES = 32, 64, 32


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10)).cuda()


def batch(samples: int = SAMPLES, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, SIDE, SIDE, dtype=dtype), torch.randint(10, (samples,))


def gradients(model: nn.Module, micro_batch: int, **options: Any) -> dict[str, Tensor]:
    """The gradients of an update."""
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        )
    )
    dtype = next(model.parameters()).dtype
    criterion = nn.CrossEntropyLoss()
    Accumulator(model, optimizer, criterion=criterion, micro_batch=micro_batch, **options).step(batch(dtype=dtype))
    return seen


@pytest.mark.parametrize("options", [{"batchnorm": "exact"}, {"batchnorm": "exact", "coupled": True}])
@pytest.mark.parametrize("micro_batch", [1, 5, 8])
def test_gradients_equal_the_full_batchs(options: dict[str, Any], micro_batch: int) -> None:
    model = conv_net().double()
    whole = gradients(copy.deepcopy(model), SAMPLES)
    for name, gradient in gradients(model, micro_batch, **options).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-9)


def test_the_card_holds_one_part_and_the_input_of_one_batchnorm() -> None:
    peaks = {}
    for micro_batch in (SAMPLES, 8, 2):
        model = conv_net()
        gradients(model, micro_batch, batchnorm="exact")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, micro_batch, batchnorm="exact")
        peaks[micro_batch] = torch.cuda.max_memory_allocated() - before
    waiting = SAMPLES * CHANNELS * SIDE**2 * 4
    assert peaks[8] < peaks[SAMPLES] / 3
    assert peaks[2] < peaks[SAMPLES] / 8 + 2 * waiting
