"""The search against brute force where memory is real: every size of a small model, each tried by the CPU device."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned import make_settings

from autoaccum.devices.base import Trial
from autoaccum.devices.cpu import CpuDevice
from autoaccum.planning.search import search
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

# Every sample takes about 8 MiB for its activations, so that a step of one sample stands out of any rounding.
MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))

def batch(size):
    return torch.randn(size, 4096, 8)

def loss(model, batch):
    return model(batch).mean()
"""


@pytest.mark.slow
def test_brute_force_agrees(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    settings = make_settings(str(tmp_path / "model.py"), 64, 38 * MIB)
    with CpuDevice(settings) as device:
        device.inspect()

        def trial(size: int, *, fresh: bool, unlimited: bool = False) -> Trial:
            return device.trial((size, size), fresh=fresh)

        found = search(trial, range(1, 65), limit_bytes=device.limit_bytes)
        sizes = range(max(1, found.largest_fit - 2), found.largest_fit + 3)
        outcomes = {size: trial(size, fresh=True).outcome for size in sizes}
    runs = [size for size, outcome in outcomes.items() if outcome == "ok"]
    print(f"{outcomes}, found {[(t.micro_batch, t.outcome) for t in found.trials]}")
    assert runs == list(range(sizes.start, found.largest_fit + 1))
    assert not found.capped
