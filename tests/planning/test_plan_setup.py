"""What a plan is given: a request, and exactly one of a file, a Workload, a Trainer and live objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planned import make_request
from torch import nn

from autoaccum.api import plan
from autoaccum.devices.cpu import CpuDevice
from autoaccum.errors import UsageError
from autoaccum.planning.plan_setup import make_setup
from autoaccum.sources.source import FileSource
from autoaccum.sources.workload import Workload

PARTS = dict.fromkeys(("model", "batch", "loss", "criterion", "weight"))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randint(0, 2, (size,))


def live(**changes: Any) -> dict[str, Any]:
    return {**PARTS, "model": nn.Linear(4, 2), "batch": batch, "criterion": nn.CrossEntropyLoss(), **changes}


@pytest.mark.parametrize("reference", ["model.py", Path("model.py")])
def test_a_file_is_named_by_its_path(reference: Any) -> None:
    assert make_setup(reference, make_request(8, device="cpu"), live=PARTS).settings.source == FileSource("model.py")


WORKLOAD = Workload(model=lambda: nn.Linear(4, 2), batch=batch, criterion=nn.CrossEntropyLoss(), name="tiny")


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("workload", "parts", "reference"),
    [(WORKLOAD, PARTS, "tiny (made in code)"), (None, live(), "Linear (made in code)")],
)
def test_what_is_made_in_code_is_tried_in_processes_of_its_own(
    workload: Any, parts: dict[str, Any], reference: str
) -> None:
    setup = make_setup(workload, make_request(8, device="cpu", precision="bf16", optimizer="sgd"), live=parts)
    assert (type(setup.device), setup.settings.source.name, setup.live) == (CpuDevice, reference, None)
    with setup.running() as device:
        inspection = device.inspect()
    assert (inspection.spec.precision, inspection.workload.optimizer) == ("bf16", "SGD")


PARTLY_META = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta"))


@pytest.mark.parametrize(
    ("workload", "parts", "asked", "text"),
    [
        (None, PARTS, {}, "there is nothing to plan: give one"),
        ("model.py", live(weight=None), {}, "a workload is given, and model, batch and criterion too"),
        (None, live(batch=None), {}, "model and criterion given, batch missing"),
        (None, {**PARTS, "loss": nn.MSELoss()}, {}, "loss given, model and batch missing"),
        (None, live(data=[1]), {}, "data is given without a trainer"),
        (None, {**PARTS, "trainer": 3}, {}, "trainer is of type int"),
        (3, PARTS, {}, "the workload is of type int"),
        (nn.Linear(4, 2), PARTS, {"gpu": "rtx3090"}, "the workload is of type Linear"),
        (None, live(evaluate=print), {}, "evaluate is given without evaluation_batch"),
        (None, live(), {"longest_of": 10}, "longest_of is 10, and live objects have no dataset"),
        (None, live(model=nn.Linear(4, 2, device="meta")), {}, "the model is on meta, where no trial"),
        (None, live(model=PARTLY_META), {}, "is on cpu and meta, trials"),
    ],
)
def test_refuses_what_does_not_go_together(
    workload: Any, parts: dict[str, Any], asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError) as refused:
        make_setup(workload, make_request(8, **asked), live=parts)
    assert text in str(refused.value)


def test_a_reduction_belongs_to_live_objects() -> None:
    with pytest.raises(UsageError, match="a workload is given, and reduction too"):
        plan("model.py", target_batch=8, reduction="sum")


def test_a_live_optimizer_does_not_go_with_a_file() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(UsageError, match=r"optimizer is of type SGD, and .*def optimizer\(params\)"):
        plan("model.py", target_batch=8, optimizer=optimizer)


def test_the_share_the_cap_and_the_schedule() -> None:
    request = make_request(257, world_size=2, max_micro_batch=100)
    assert (request.rank_samples, request.cap) == (129, 100)
    assert request.schedule(100).ranks == ((65, 64), (64, 64))
    assert make_request(8, max_micro_batch=100).cap == 8
    assert make_request(12, multiple_of=2, max_micro_batch=5).cap == 4


@pytest.mark.parametrize(
    ("target", "ceiling", "least", "asked", "sizes"),
    [
        (256, 100, 1, {}, (1, 2, 4, 8, 16, 32, 64, 86)),
        (8, 8, 2, {}, (2, 4, 8)),
        (24, 12, 4, {"multiple_of": 4}, (4, 8, 12)),
        (24, 12, 1, {"equal": True}, (1, 2, 4, 8, 12)),
        (7, 4, 2, {}, (4,)),
    ],
)
def test_the_ladder_doubles_up_to_the_ceiling(
    target: int, ceiling: int, least: int, asked: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert make_request(target, **asked).ladder(ceiling, least) == sizes


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"target": 0}, "the target batch is 0: give a whole number of at least 1"),
        ({"target": 4, "max_micro_batch": 0}, "is 0: give a whole number of at least 1"),
        ({"target": 10**9, "equal": True}, "the target batch is beyond 10,000,000: take a smaller one"),
        ({"target": 10**400}, "the target batch is beyond 10,000,000"),
        ({"target": 4, "world_size": 10**9}, "the world size is beyond 100,000"),
        (
            {"target": 4, "mesh": "2x8", "world_size": 8, "gpu": "h100"},
            "the mesh 2x8 has 16 ranks, and there are 8: give a mesh of 8",
        ),
        (
            {"target": 4, "mesh": "2x1", "world_size": 2},
            r"run the whole model, and fsdp2 shards it: plan .* \(--gpu",
        ),
        ({"target": 4, "parallel": "fsdp2"}, "trials on a device of this machine run the whole model"),
        ({"target": 4, "max_trials": 0}, "max_trials is 0: give a whole number of at least 1"),
        (
            {"target": 4, "fit_micro_batch": 2},
            "^--fit-micro-batch 2 needs --savers auto or --solve: add one",
        ),
        ({"target": 4, "explain": "no"}, "explain is 'no': give True or False"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_eats_memory(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_request(**numbers)
