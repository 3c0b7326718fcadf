"""What a plan is given: exactly one of a file, a Workload, a Trainer and live objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import make_request
from torch import nn

from autoaccum.api import plan
from autoaccum.devices.cpu import CpuDevice
from autoaccum.errors import UsageError
from autoaccum.planning.plan_setup import make_setup
from autoaccum.sources.workload import Workload

PARTS = dict.fromkeys(("model", "batch", "loss", "criterion", "weight"))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randint(0, 2, (size,))


def live(**changes: Any) -> dict[str, Any]:
    return {**PARTS, "model": nn.Linear(4, 2), "batch": batch, "criterion": nn.CrossEntropyLoss(), **changes}


@pytest.mark.parametrize("reference", ["model.py", Path("model.py")])
def test_a_file_is_named_by_its_path(reference: Any) -> None:
    assert make_setup(reference, make_request(8, device="cpu"), live=PARTS).reference == "model.py"


WORKLOAD = Workload(model=lambda: nn.Linear(4, 2), batch=batch, criterion=nn.CrossEntropyLoss(), name="tiny")


@pytest.mark.parametrize(
    ("workload", "parts", "reference"),
    [(WORKLOAD, PARTS, "tiny (made in code)"), (None, live(), "Linear (made in code)")],
)
def test_what_is_made_in_code_is_tried_in_processes_of_its_own(
    workload: Any, parts: dict[str, Any], reference: str
) -> None:
    setup = make_setup(workload, make_request(8, device="cpu", precision="bf16", optimizer="sgd"), live=parts)
    assert (type(setup.device), setup.reference, setup.live) == (CpuDevice, reference, None)
    with setup.running() as device:
        inspection = device.inspect()
    assert (inspection.spec.precision, inspection.workload.optimizer) == ("bf16", "SGD")


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


@pytest.mark.parametrize(
    ("changed", "asked", "text"),
    [
        ({"evaluate": lambda model, batch: None}, {}, "evaluate is given without evaluation_batch"),
        ({}, {"worst_of": 10}, "worst_of is 10, and live objects have no dataset"),
        ({"model": nn.Linear(4, 2, device="meta")}, {}, "the model is on meta, where no trial"),
        ({"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta"))}, {}, "is on cpu and meta, trials"),
    ],
)
def test_what_live_objects_lack(changed: dict[str, Any], asked: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_setup(None, make_request(8, **asked), live=live(**changed))


def test_a_reduction_belongs_to_live_objects() -> None:
    with pytest.raises(UsageError, match="a workload is given, and reduction too"):
        plan("model.py", target_batch=8, reduction="sum")


def test_a_live_optimizer_does_not_go_with_a_file() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match=r"optimizer is of type SGD, and .*def optimizer\(params\)"):
        plan("model.py", target_batch=8, optimizer=optimizer)
