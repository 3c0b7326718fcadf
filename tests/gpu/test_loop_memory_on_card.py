"""On a card, what stands around the step is in the peak, to the rounding of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from asking import make_settings

from autoaccum.devices.cuda import CudaDevice
from autoaccum.units import MIB

pytestmark = pytest.mark.gpu

SIZE, WIDTH, CLASSES = 256, 512, 16_384
LOGITS = 4 * SIZE * CLASSES
PARAMETERS = 4 * (WIDTH * CLASSES + CLASSES)
ROUNDING = MIB

WORKLOAD = f"""
import torch
from torch import nn

def model():
    return nn.Linear({WIDTH}, {CLASSES})

def batch(size):
    return torch.randn(size, {WIDTH}), torch.randint(0, {CLASSES}, (size,))

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture
def peak(write_workload: Callable[[str], str]) -> Callable[..., int]:
    reference = write_workload(WORKLOAD)

    def measure(**asked: Any) -> int:
        settings = make_settings(reference, 2 * SIZE, **asked)
        with CudaDevice(settings, index=torch.cuda.current_device()) as device:
            trial = device.trial((SIZE, SIZE))
        assert trial.ran, trial.message
        assert trial.peak_allocated_bytes is not None
        return trial.peak_allocated_bytes

    return measure


def test_outputs_and_averages_are_in_the_peak(peak: Callable[..., int]) -> None:
    plain = peak()
    assert peak(keeps=("outputs",)) - plain == pytest.approx(LOGITS, abs=ROUNDING)
    assert peak(keeps=("ema",)) - plain == pytest.approx(PARAMETERS, abs=ROUNDING)


def test_an_evaluation_is_in_the_peak_where_it_is_higher(peak: Callable[..., int]) -> None:
    plain = peak()
    assert peak(evaluation_batch=16) == pytest.approx(plain, abs=ROUNDING)
    assert peak(evaluation_batch=8 * SIZE) >= PARAMETERS + 2 * 8 * LOGITS
