"""Plans of steps whose random numbers on the host decide what runs: stochastic depth, for example."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import codes
from in_process_tracer import InProcessTracer
from planned import CARD, make_settings, plan_simulated

from autoaccum.devices.cpu import CpuDevice
from autoaccum.planning.plan_record import Plan
from autoaccum.units import MIB

MODEL = """
import random
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            if {skips}:
                continue
            x = x + block(x).tanh()
        return x

def batch(n):
    return torch.rand(n, 64) + np.random.rand() + random.random(), torch.randn(n, 64)

model, criterion = Net, nn.MSELoss()
"""


def plan(path: Path, skips: str) -> Plan:
    path.write_text(MODEL.format(skips=skips))
    return plan_simulated(InProcessTracer(make_settings(str(path), 256), CARD), 256, 23 * MIB)


@pytest.mark.parametrize(
    ("skips", "decides"),
    [
        ("random.random() < 0.6", True),
        ("np.random.uniform(0, 1) > 0.4", True),
        ("torch.rand([]) < 0.6", True),
        ("False", False),
        ("random.random() < 0", False),
        ("torch.rand(64).sum() < 0", False),
    ],
)
def test_a_plan_says_that_random_numbers_decide_what_runs(skips: str, decides: bool, tmp_path: Path) -> None:
    planned = plan(tmp_path / "drawn.py", skips)
    assert ("random_memory" in codes(planned.notes)) is decides
    assert "not_extrapolated" not in codes(planned.notes), "all sizes skip the same"


@pytest.mark.usefixtures("warm_children")
def test_so_does_one_by_trials_on_the_cpu_and_its_trials_repeat(tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(MODEL.format(skips="random.random() < 0.6"))
    with CpuDevice(make_settings(str(path), 4096, 400 * MIB)) as device:
        assert codes(device.inspect().notes[:1]) == ["random_memory"]
        first, second = (device.trial((4096,), fresh=True).peak_reserved_bytes for _ in range(2))
    assert first == pytest.approx(second, abs=MIB)
