"""Bisections on their own, each in new processes, end at the same size: a plan can be trusted on the next day."""

from __future__ import annotations

from typing import Any

from asking import make_settings

from autoaccum.devices.cpu import CpuDevice
from autoaccum.units import MIB

LEAST, MOST = 12, 20

WORKLOAD = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

def batch(size):
    return torch.randn(size, 3, 96, 96), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""


def bisect(reference: str) -> int:
    settings = make_settings(reference, 2 * MOST, 54 * MIB)
    with CpuDevice(settings) as device:
        low, high = LEAST, MOST
        assert device.trial((low, low)).outcome == "ok"
        while high - low > 1:
            size = (low + high) // 2
            trial = device.trial((size, size))
            assert trial.outcome in ("ok", "oom"), trial.message
            low, high = (size, high) if trial.ran else (low, size)
        return low


def test_two_bisections_end_at_the_same_size(write_workload: Any) -> None:
    reference = write_workload(WORKLOAD)
    ceilings = {bisect(reference) for _ in range(2)}
    assert len(ceilings) == 1
    assert LEAST < ceilings.pop() < MOST - 1
