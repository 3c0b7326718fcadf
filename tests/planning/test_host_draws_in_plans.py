"""Plans of steps whose random numbers on the host decide what runs: stochastic depth, for example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from asking import make_settings
from in_process_tracer import InProcessTracer
from planned import CARD, plan_simulated

from autoaccum.devices.cpu import CpuDevice
from autoaccum.planning.plan_record import Plan
from autoaccum.units import MIB

MODEL = """
import random
import numpy as np
import torch
from torch import nn

numbers, made = np.random.default_rng(), torch.Generator()

def is_less(limit, rng=np.random.Generator(np.random.SFC64(3))):
    return rng.random() < limit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.draws, self.settings = np.random.RandomState(0), dict(own=random.Random(0))
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
SAID = "random numbers drawn on the host decide what runs"


def plan(path: Path, skips: str) -> Plan:
    path.write_text(MODEL.format(skips=skips))
    return plan_simulated(InProcessTracer(make_settings(str(path), 256), CARD), 256, 23 * MIB)


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of the same model without random numbers."""
    return plan(tmp_path_factory.mktemp("never") / "never.py", "False")


def notes(plan: Plan) -> list[str]:
    return [text for text in plan.notes if text.startswith(SAID)]


@pytest.mark.parametrize(
    ("skips", "near"),
    [
        ("random.random() < 0.6", 1),
        ("np.random.uniform(0, 1) > 0.4", 0),
        ("torch.rand([]) < 0.6", 1),
        ("numbers.random() < 0.6", 1),
        ("is_less(0.6)", 1),
        ("self.settings['own'].random() < 0.6", 1),
        ("self.draws.rand() < 0.6", 1),
        ("torch.rand([], generator=made) < 0.6", 1),
    ],
)
def test_what_may_be_skipped_is_planned_to_run(skips: str, near: int, never: Plan, tmp_path: Path) -> None:
    drawn = plan(tmp_path / "drawn.py", skips)
    assert (notes(never), notes(drawn)) == (
        [],
        [f"{SAID}: planned with numbers near {near}, which need the most memory of 5 draws"],
    )
    assert (drawn.micro_batches, drawn.peak_bytes) == (never.micro_batches, never.peak_bytes)
    assert [trial.peak_reserved_bytes for trial in drawn.trials] == [each.peak_reserved_bytes for each in never.trials]
    assert not [text for text in drawn.notes if "traced by itself" in text]


def test_numbers_without_a_worst_end_are_planned_as_the_worst_of_several(tmp_path: Path) -> None:
    planned = plan(tmp_path / "middle.py", "not 0.2 < random.random() < 0.8")
    (said,) = notes(planned)
    assert re.search(r"planned with those of seed [123], which need the most memory of 5 draws$", said)


@pytest.mark.parametrize("skips", ["random.random() < 0", "torch.rand(64).sum() < 0"])
def test_numbers_that_decide_nothing_change_nothing(skips: str, tmp_path: Path) -> None:
    planned = plan(tmp_path / "draws_nothing.py", skips)
    assert notes(planned) == []


def test_trials_on_the_cpu_draw_the_worst_numbers(tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(MODEL.format(skips="numbers.random() < 0.6"))
    with CpuDevice(make_settings(str(path), 4096, 400 * MIB)) as device:
        assert device.inspect().draw == "numbers near 1"
        drawn = device.trial((4096,))
    path.write_text(MODEL.format(skips="False"))
    with CpuDevice(make_settings(str(path), 4096, 400 * MIB)) as device:
        assert device.inspect().draw is None
        never = device.trial((4096,))
    assert drawn.peak_reserved_bytes is not None
    assert never.peak_reserved_bytes is not None
    assert drawn.peak_reserved_bytes > never.peak_reserved_bytes - 2 * MIB
