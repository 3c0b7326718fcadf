"""A plan says which modules couple samples, and whether the loss does, where a micro-batch is not all of a batch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import planted_causes as planted
import pytest
import small_verified as small
import torch
from factories import codes
from state_digests import state_digest
from torch import nn

import autoaccum
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import Inspection, TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.inspection import inspect_workload
from autoaccum.planning.plan_messages import all_notes
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.sources.source import FileSource
from autoaccum.sources.workload import Workload
from autoaccum.units import MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

FILE = """
import torch
from torch import nn

class Centring(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def model():
    return nn.Sequential(nn.Linear(4, 4), Centring(), nn.Linear(4, 2))

def batch(size):
    return torch.randn(size, 4), torch.randn(size, 2)

criterion = nn.MSELoss()
"""


def plan(model: nn.Module, loss: Any, **more: Any) -> Plan:
    settings: dict[str, Any] = {"target_batch": 8, "max_micro_batch": 4, "memory": MemorySize(bytes=256 * MIB)}
    return autoaccum.plan(model=model, batch=small.pairs, loss=loss, **settings | more)


def inspect(model: Any, loss: Any = small.class_loss, **more: Any) -> Inspection:
    return inspect_workload(Workload(model=model, batch=small.pairs, loss=loss, **more), rank_samples=8)


def test_a_live_model_is_told_of_and_left_as_it_was() -> None:
    model = small.between(planted.Standardise())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state_digest(model, optimizer)
    made = plan(model, planted.root_loss, optimizer=optimizer)
    assert state_digest(model, optimizer) == before
    assert made.coupling == Coupling(("1",), True, None)
    assert codes(made.warnings).count("module_mixes_samples") == 1
    assert codes(made.warnings).count("loss_mixes_samples") == 1
    assert "weight_mismatch" not in codes(made.warnings)
    assert Plan.from_json(made.to_json()) == made


def test_nothing_is_said_where_all_is_well_and_plans_of_before_still_load() -> None:
    well = plan(small.Mlp(), small.class_loss)
    assert well.coupling == Coupling((), False, None)
    assert not {"module_mixes_samples", "loss_mixes_samples"} & set(codes(well.warnings))
    record = json.loads(well.to_json())
    del record["coupling"]
    old = Plan.from_json(json.dumps(record))  # As plans of before.
    assert old.coupling is None
    assert old.digest() == well.digest()


def test_a_batchnorm_and_a_loss_that_mixes_are_warned_of_once_each() -> None:
    found = inspect(lambda: small.between(nn.BatchNorm1d(8)), planted.root_loss)
    normed, mixed = found.accumulation_warnings
    assert (normed.code, mixed.code) == ("batchnorm_of_parts", "loss_mixes_samples")
    assert found.warnings == ()


def test_no_code_of_the_users_within_the_experiment_ends_a_plan() -> None:
    def single_only(model: nn.Module, batch: Any) -> Any:
        if batch[0].dtype == torch.float64:
            raise SystemExit("no double")
        return small.class_loss(model, batch)

    class Kept(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("do not copy me")

    assert plan(small.Mlp(), single_only).coupling == Coupling((), False, None)
    assert plan(Kept(small.FEATURES, small.CLASSES), small.class_loss).coupling == Coupling(
        reason="the model cannot be copied"
    )


@pytest.mark.parametrize(("cut", "looked"), [(3, False), (3, True), (8, False)])
def test_notes_say_where_it_was_not_looked(cut: int, looked: bool) -> None:
    found = inspect(small.Mlp)
    if not looked:
        found = dataclasses.replace(found, coupling=None)  # As where a card is simulated.
    notes = all_notes(found, make_schedule(8, cut), PlanRequest(8), cut, None, ())
    assert ("not_verified" in codes(notes)) == (cut < 8 and not looked)


def test_a_process_of_its_own_tells_it_too(tmp_path: Path) -> None:
    path = tmp_path / "centred.py"
    path.write_text(FILE)
    with CpuDevice(TrialSettings(source=FileSource(str(path)), rank_samples=8)) as device:
        found = device.inspect()
    assert found.coupling == Coupling(("1",), False, None)
    assert "module_mixes_samples" in codes(found.accumulation_warnings)
