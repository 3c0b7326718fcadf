"""What a real process holds at most falls under `recompute` by what the recomputed blocks do not keep."""

from __future__ import annotations

from typing import Any

import pytest
from asking import make_settings

from autoaccum.devices.cpu import CpuDevice
from autoaccum.units import MIB

WIDTH, BLOCKS, SIZE = 32, 8, 32768
WIDE = 4 * SIZE * WIDTH
"""The bytes of a tensor between layers. Of each block, backward needs its input and that of its second layer."""

WORKLOAD = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range({BLOCKS})))

def batch(size):
    return torch.randn(size, {WIDTH}), torch.randn(size, {WIDTH})

criterion = nn.MSELoss()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_resident_memory_falls_by_what_recomputed_blocks_do_not_keep(write_workload: Any) -> None:
    """Backward begins in the last block: where that is recomputed, its own activations are there again by then."""
    peaks = {}
    with CpuDevice(make_settings(write_workload(WORKLOAD), 2 * SIZE, 1024 * MIB)) as device:
        for count in (0, BLOCKS, 3):
            device.use_savers((f"recompute={count}",) if count else ())
            trial = device.trial((SIZE, SIZE))
            assert trial.outcome == "ok", trial.message
            assert trial.peak_reserved_bytes is not None
            peaks[count] = trial.peak_reserved_bytes
    for count, not_kept in ((3, 3), (BLOCKS, BLOCKS - 1)):
        assert abs(peaks[0] - peaks[count] - not_kept * WIDE) < MIB
