"""Plans on the CPU, whose trials in a used process are short: they agree with whole ones in processes of their own."""

from __future__ import annotations

from typing import Any

import pytest
from planned import make_settings, plan_on

from autoaccum.accumulation.schedule import make_schedule, part_sizes
from autoaccum.devices.base import Trial
from autoaccum.devices.cpu import CpuDevice
from autoaccum.planning.plan_record import Plan
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

# A sample takes about 2 MiB for its activations. The model knows which part of an update it runs.
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.parts = nn.Linear(8, 256), nn.Linear(256, 1), 0

    def forward(self, inputs):
        self.parts = 0 if self.first.weight.grad is None else self.parts + 1
        rows = torch.cat([inputs] * {copies})
        return self.last(self.first(rows).relu()).mean()

model = Net

def batch(size):
    return torch.randn(size, 1024, 8)

def loss(model, batch):
    return model(batch)

class Growing(torch.optim.SGD):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]].setdefault("past", []).append(torch.ones({state}))
        return super().step(closure)

def optimizer(params):
    return Growing(params, lr=0.0)
"""
TARGET = 50


def plan(write_workload: Any, memory_mib: int, copies: str = "1", state: str = "1") -> tuple[Plan, Trial, Trial]:
    """Return a plan, and fresh trials of its schedule and of the next larger one."""
    settings = make_settings(write_workload(MODEL.format(copies=copies, state=state)), TARGET, memory_mib * MIB)
    with CpuDevice(settings) as device:
        planned = plan_on(device, TARGET)
        sizes = part_sizes(TARGET, TARGET)
        larger = sizes[sizes.index(planned.micro_batch) + 1]
        fresh = [device.trial(make_schedule(TARGET, size).trial_parts, fresh=True) for size in (sizes[-1], larger)]
        own = device.trial(make_schedule(TARGET, planned.micro_batch).trial_parts, fresh=True)
    assert not fresh[0].ran
    return planned, own, fresh[1]


@pytest.mark.parametrize(
    "kind",
    [
        {"memory_mib": 40},
        {"memory_mib": 60, "copies": "(1, 1, 2)[min(self.parts, 2)]"},
        {"memory_mib": 60, "copies": "(1, 2, 1)[min(self.parts, 2)]"},
        {"memory_mib": 60, "copies": "(2, 1, 1)[min(self.parts, 2)]"},
        {"memory_mib": 60, "state": "2 * 2**20"},
    ],
    ids=["plain", "peak in the third part", "peak in the second part", "peak in the first part", "growing state"],
)
def test_a_plan_agrees_with_whole_trials_in_fresh_processes(write_workload: Any, kind: dict[str, Any]) -> None:
    planned, own, larger = plan(write_workload, **kind)
    (proof,) = [trial for trial in planned.trials if trial.ran and trial.parts == own.parts and trial.fresh]
    assert own.ran
    assert not larger.ran, "it fails as the short trial said"
    assert proof.peak_reserved_bytes == pytest.approx(own.peak_reserved_bytes, rel=0.02)
    failed = [trial for trial in planned.trials if not trial.ran]
    assert min(trial.micro_batch for trial in failed) == larger.micro_batch
    assert all(trial.fresh for trial in failed), "nothing that earlier jobs left was missing"


def test_what_runs_in_the_process_of_the_inspection_has_yet_to_run_in_a_fresh_one(write_workload: Any) -> None:
    with CpuDevice(make_settings(write_workload(MODEL.format(copies="1", state="1")), TARGET, 60 * MIB)) as device:
        device.inspect()
        assert not device.trial((2, 2)).fresh
        failed = device.trial((TARGET, TARGET))
        assert (failed.ran, failed.fresh) == (False, True)
        assert device.trial((2, 2), fresh=True).fresh
