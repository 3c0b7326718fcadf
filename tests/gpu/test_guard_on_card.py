"""A guard of what really runs: three runs of the schedule, of which a card's are equal to a segment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoaccum.guarding.cases import Case, check_case, make_case
from autoaccum.guarding.guard_run import guard
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.project import Project
from autoaccum.units import MIB

WORKLOAD = """
from torch import nn, randn

def model():
    return nn.Sequential(nn.Linear(512, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

def batch(size):
    return randn(size, 512), randn(size, 8)

criterion = nn.MSELoss()
"""


@pytest.mark.gpu
def test_a_wider_layer_is_caught_on_the_card(write_workload: Callable[[str], str]) -> None:
    model = Path(write_workload(f"WIDTH = 4096\n{WORKLOAD}"))
    case = check_case(make_case(workload=model.name, device="cuda", target_batch=4096, micro_batch=2048, memory="2GiB"))
    project = Project(folder=model.parent, lock=model.parent / "autoaccum.lock", cases=(case,))
    locked = guard([Case()], project, update=True).verdicts[0]
    assert (locked.outcome, locked.exit_code) == ("locked", 0)
    assert locked.now is not None
    assert (locked.now.kind, locked.now.card) == ("measured", torch.cuda.get_device_name(0))
    assert len(locked.now.runs) == 3
    assert locked.now.spread_bytes <= 20 * MIB
    assert locked.now.versions["cuda"] == torch.version.cuda
    again = guard([Case()], project)
    assert again.exit_code == 0
    model.write_text(f"WIDTH = 8192\n{WORKLOAD}")
    grown = guard([Case()], project).verdicts[0]
    assert (grown.outcome, grown.exit_code) == ("regressed", 1)
    assert grown.growth_bytes is not None
    assert grown.growth_bytes > 32 * MIB


@pytest.mark.gpu
def test_another_card_is_not_compared(write_workload: Callable[[str], str]) -> None:
    model = Path(write_workload(f"WIDTH = 1024\n{WORKLOAD}"))
    case = check_case(make_case(workload=model.name, device="cuda", target_batch=64, micro_batch=32, memory="1GiB"))
    project = Project(folder=model.parent, lock=model.parent / "autoaccum.lock", cases=(case,))
    guard([Case()], project, update=True)
    measured = read_lock(project.lock, "")[case]
    write_lock(project.lock, {case: dataclasses.replace(measured, card="NVIDIA Nothing")})
    told = guard([Case()], project).verdicts[0]
    assert (told.outcome, told.exit_code) == ("unmeasured", 3)
    assert "was measured on NVIDIA Nothing, this is" in told.reasons[0]
