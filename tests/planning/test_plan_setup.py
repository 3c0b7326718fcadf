"""Which way a plan's trials run, by what was given; nothing is started here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import make_request
from torch import nn

from autoaccum.api import plan
from autoaccum.devices.in_place import InPlaceDevice
from autoaccum.errors import UsageError
from autoaccum.planning.plan_setup import make_setup
from autoaccum.workload.spec import Workload

PARTS = dict.fromkeys(("model", "batch", "loss", "criterion", "weight"))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randint(0, 2, (size,))


def live(**changes: Any) -> dict[str, Any]:
    return {**PARTS, "model": nn.Linear(4, 2), "batch": batch, "criterion": nn.CrossEntropyLoss(), **changes}


def test_a_file_is_tried_in_processes_of_its_own() -> None:
    for reference in ("model.py", Path("model.py")):
        setup = make_setup(reference, make_request(8, device="cpu"), live=PARTS)
        assert (setup.reference, setup.isolated, setup.device.name) == ("model.py", True, "cpu")


def test_live_objects_are_tried_in_place() -> None:
    setup = make_setup(None, make_request(8), live=live())
    assert isinstance(setup.device, InPlaceDevice)
    assert (setup.reference, setup.isolated) == ("Linear (in this process)", False)


def test_a_workload_made_in_code_is_tried_in_place() -> None:
    workload = Workload(model=lambda: nn.Linear(4, 2), batch=batch, criterion=nn.CrossEntropyLoss(), name="tiny")
    setup = make_setup(workload, make_request(8, device="cpu", precision="bf16", optimizer="sgd"))
    assert isinstance(setup.device, InPlaceDevice)
    assert setup.reference == "tiny (in this process)"
    inspection = setup.device.inspect()
    assert (inspection.precision, inspection.optimizer) == ("bf16", "SGD")
    assert dataclasses.replace(workload) == workload


@pytest.mark.parametrize(
    ("workload", "parts", "text"),
    [
        (None, PARTS, "there is nothing to plan: give one"),
        ("model.py", live(weight=None), "a workload is given, and model, batch and criterion too"),
        (None, live(batch=None), "model and criterion given, batch missing"),
        (None, {**PARTS, "loss": nn.MSELoss()}, "loss given, model and batch missing"),
        (3, PARTS, "the workload is of type int"),
        (nn.Linear(4, 2), PARTS, "the workload is of type Linear"),
    ],
)
def test_exactly_one_way_is_given(workload: Any, parts: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as seen:
        make_setup(workload, make_request(8), live=parts)
    assert text in str(seen.value)


@pytest.mark.parametrize(
    ("workload", "parts", "device", "text"),
    [
        ("model.py", PARTS, "cuda:1", "both --device cuda:1 and --gpu rtx3090 are given: choose one"),
        ("model.py", PARTS, "cpu", "both --device cpu and --gpu rtx3090 are given"),
        (None, live(), "cpu", "both --device cpu and --gpu rtx3090 are given"),
        (nn.Linear(2, 2), PARTS, "auto", "the workload is of type Linear"),
    ],
)
def test_what_a_simulated_card_does_not_go_with(workload: Any, parts: dict[str, Any], device: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_setup(workload, make_request(8, device=device, gpu="rtx3090"), live=parts)


def test_a_reduction_belongs_to_live_objects() -> None:
    with pytest.raises(UsageError, match="a workload is given, and reduction too"):
        plan("model.py", target_batch=8, reduction="sum")


def test_a_live_optimizer_does_not_go_with_a_file() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match=r"optimizer is of type SGD, and .*def optimizer\(params\)"):
        plan("model.py", target_batch=8, optimizer=optimizer)
