"""Trials in place where the model is: on the CPU everywhere, and the same on a card where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import nn

from autoaccum.devices.in_place import InPlaceDevice, LiveObjects
from autoaccum.options import Options
from autoaccum.units import GIB, MIB, MemorySize
from autoaccum.workload.objective import resolve_objective
from autoaccum.workload.spec import Workload

PLACES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
BUDGET_BYTES = 256 * MIB


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.Dropout(0.1), nn.Linear(1024, 8))


def batch(size: int) -> Any:
    return torch.randn(size, 256), torch.randint(0, 8, (size,))


@pytest.fixture(params=PLACES)
def setup(request: pytest.FixtureRequest) -> tuple[InPlaceDevice, nn.Module, torch.optim.Optimizer]:
    model = build().to(request.param)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    criterion = nn.CrossEntropyLoss(weight=torch.ones(8))
    objects = LiveObjects(
        model=model, batch=batch, objective=resolve_objective(criterion), options=Options(optimizer=optimizer)
    )
    return InPlaceDevice(objects, share=60_000, memory=MemorySize(bytes=BUDGET_BYTES)), model, optimizer


def test_what_is_on_the_device_is_restored(setup: Any) -> None:
    device, model, optimizer = setup
    gradients = [parameter.grad for parameter in model.parameters()]
    before, where = state_digest(model, optimizer), model[0].weight.device
    inspection = device.inspect()
    assert (inspection.model, device.describe()["limit_bytes"]) == ("Sequential", BUDGET_BYTES)
    trial = device.trial((64, 64))
    assert trial.outcome == "ok", trial.message
    assert trial.peak_reserved_bytes is not None
    assert device.describe()["held_bytes"] < trial.peak_reserved_bytes <= BUDGET_BYTES
    assert state_digest(model, optimizer) == before
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert model[0].weight.device == where


def test_real_out_of_memory_leaves_everything_as_it_was(setup: Any) -> None:
    device, model, optimizer = setup
    before = state_digest(model, optimizer)
    trial = device.trial((60_000,))
    assert (trial.outcome, trial.certain) == ("oom", True), trial.message
    assert state_digest(model, optimizer) == before
    assert device.trial((64, 64)).outcome == "ok"
    assert state_digest(model, optimizer) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_workload_made_in_code_goes_to_the_requested_device(place: str) -> None:
    made = Workload(model=build, batch=batch, criterion=nn.CrossEntropyLoss())
    with InPlaceDevice(made, share=256, device=place, memory=MemorySize(bytes=BUDGET_BYTES)) as device:
        assert device.name == place
        device.inspect()
        assert device.trial((64, 64)).outcome == "ok"


@pytest.mark.gpu
def test_the_card_s_own_settings_are_restored(setup: Any) -> None:
    device, _, _ = setup
    if device.name == "cpu":
        return
    torch.cuda.manual_seed(5)
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        mine = torch.ones(64, device="cuda")
        assert device.trial((64, 64)).outcome == "ok"
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        assert float(mine.sum()) == 64
        drawn = torch.rand(3, device="cuda")
        torch.cuda.manual_seed(5)
        assert torch.equal(torch.rand(3, device="cuda"), drawn)
        assert torch.cuda.memory_reserved() < GIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
