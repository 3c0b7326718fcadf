"""The peak of a trial is that of a trainer which accumulates gradients, not that of its first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import make_settings
from warm_children import WarmPython

from autoaccum.devices.child.process import child_environment
from autoaccum.devices.cpu import CpuDevice
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

WIDTH = 256
SIZE = 1024
BATCH_BYTES = 2 * SIZE * WIDTH * 4
PARAMETER_BYTES = 4 * WIDTH * (WIDTH + 1) * 4

WORKLOAD = f"""
import torch
from torch import nn

def model():
    layers = [nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers)

def batch(size):
    return torch.randn(size, {WIDTH}), torch.randn(size, {WIDTH})

criterion = nn.MSELoss()

def optimizer(params):
    return torch.optim.Adam(params)
"""

FIRST_STEP = """
import sys
from autoaccum.devices.host_memory import read_process_memory, reset_peak
from autoaccum.devices.meters import warm_up
from autoaccum.workload.loading import load_workload

warm_up()
workload = load_workload(sys.argv[1])
assert reset_peak()
before = read_process_memory()
model = workload.build_model()
optimizer = workload.build_optimizer(model)
inputs, targets = workload.build_batch(int(sys.argv[2]))
workload.criterion(model(inputs), targets).backward()
optimizer.step()
print(read_process_memory().peak_above(before))
"""


@pytest.fixture(scope="module")
def reference(write_workload: Any) -> str:
    written: str = write_workload(WORKLOAD)
    return written


@pytest.fixture(scope="module")
def device(reference: str) -> Iterator[CpuDevice]:
    with CpuDevice(make_settings(reference, SIZE, 1024 * MIB)) as made:
        yield made


@pytest.mark.slow
def test_the_trials_peak_is_the_accumulating_peak_above_the_first_steps(
    device: CpuDevice, reference: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """The same measure is taken around a fresh model's first forward, backward and update."""
    environment = child_environment()
    made = warm_python(tmp_path, "-c", FIRST_STEP, reference, str(SIZE), environment=environment, measured=True)
    first_step = int(made.stdout)
    trial = device.trial((SIZE, SIZE))
    assert trial.outcome == "ok", trial.message
    assert trial.peak_reserved_bytes is not None
    resident = 2 * PARAMETER_BYTES  # Adam's two moments, which a first step does not have in its backward.
    assert trial.peak_reserved_bytes > first_step + resident - 2 * MIB
