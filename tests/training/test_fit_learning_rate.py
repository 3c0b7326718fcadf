"""A learning rate given directly or by a tuned plan applies from the first update on, also after resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import assert_close, make_plan
from small_fit import fit as fit_small
from small_fit import newest_checkpoint, of_kind
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

from autoaccum.errors import UsageError
from autoaccum.messages import Message
from autoaccum.planning.plan_record import Plan
from autoaccum.sources.workload import Workload
from autoaccum.spec import DeviceFacts, TrainingSpec
from autoaccum.training.fit_events import FitResult, Notice, Updated
from autoaccum.training.run_folder import RunFolder, read_checkpoint

INPUTS = torch.linspace(-1, 1, 72).reshape(24, 3)
DATA = TensorDataset(INPUTS, INPUTS[:, :2].clone())
PLAN = make_plan(8, 4, workload={}, learning_rate=0.02)


def two_groups(params: list[Any]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    return SGD(groups, lr=0.1, momentum=0.9)


def workload(**fields: Any) -> Workload:
    known: dict[str, Any] = {"criterion": nn.MSELoss(), "dataset": DATA, "optimizer": two_groups}
    return Workload(model=lambda: nn.Linear(3, 2), **(known | fields))


def decaying(optimizer: Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def fit(model_or_workload: Any = None, **options: Any) -> tuple[FitResult, list[float | None], list[Notice]]:
    """Train; return the result, the rates of the updates, and the notices."""
    given = workload() if model_or_workload is None else model_or_workload
    result, events = fit_small(given, **{"steps": 3, "device": "cpu"} | options)
    return result, [event.learning_rate for event in of_kind(Updated, events)], of_kind(Notice, events)


def live(**options: Any) -> dict[str, Any]:
    return {"data": DATA, "loss": nn.MSELoss(), **options}


def test_a_live_model_s_optimizer_is_set_and_a_schedule_made_of_it_follows() -> None:
    model = nn.Linear(3, 2)
    optimizer = two_groups(list(model.parameters()))
    _, rates, _ = fit(model, **live(optimizer=optimizer, scheduler=decaying, learning_rate=0.4))
    assert rates == [0.4, 0.2, 0.1]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.15)
    assert fit(nn.Linear(3, 2), **live(optimizer="SGD", learning_rate=0.4))[1] == [0.4] * 3


def test_an_existing_scheduler_is_refused_with_nothing_changed() -> None:
    model = nn.Linear(3, 2)
    optimizer = two_groups(list(model.parameters()))
    given = live(optimizer=optimizer, scheduler=decaying(optimizer))
    for options in ({"learning_rate": 0.4}, {"plan": PLAN}):
        with pytest.raises(UsageError, match=r"but the ExponentialLR already exists: give scheduler as a function"):
            fit(model, **given, **options)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]


def test_a_tuned_plan_is_trained_by_its_rate_unless_another_is_given(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "best.json")
    result, rates, notices = fit(plan=tmp_path / "best.json")
    assert rates == [0.02] * 3
    assert [notice.message for notice in notices] == [Message("tuned_rate", {"rate": 0.02})]
    assert result.warnings == ()
    assert result.plan == PLAN
    assert fit(plan=PLAN, learning_rate=0.4)[1] == [0.4] * 3
    assert fit(plan=replace(PLAN, learning_rate=None))[1:] == ([0.1] * 3, [])


def test_a_resumed_run_keeps_its_plan_s_rate_and_refuses_another(tmp_path: Path) -> None:
    whole, *_ = fit(plan=PLAN, run_dir=tmp_path / "whole", steps=6)
    fit(plan=PLAN, run_dir=tmp_path / "run")
    resumed, rates, _ = fit(run_dir=tmp_path / "run", steps=6, micro_batch=None)
    assert rates == [0.02] * 3
    assert_close(resumed.model, whole.model, 0)
    with pytest.raises(
        UsageError,
        match=r"belongs to another training: lr was 0.02, is 0.4; lr was 0.06, is 1.2: use the same",
    ):
        fit(run_dir=tmp_path / "run", steps=7, learning_rate=0.4, micro_batch=None)


@pytest.mark.usefixtures("warm_children")
def test_a_resumed_run_that_is_planned_again_has_the_same_rate(tmp_path: Path) -> None:
    card = replace(PLAN, device=DeviceFacts(name="cuda:0", kind="cuda", card="NVIDIA T4"))
    fit(plan=PLAN, run_dir=tmp_path)
    newest = newest_checkpoint(tmp_path)
    with RunFolder(tmp_path) as run:
        run.write_checkpoint(3, read_checkpoint(newest) | {"plan": card.to_json()})
    result, rates, _ = fit(run_dir=tmp_path, steps=4, micro_batch=None, memory="512MiB")
    assert result.plan is not None
    assert (result.plan.device.kind, result.plan.learning_rate) == ("cpu", 0.02)
    assert rates == [0.02]
    assert Plan.load(tmp_path / "plan.json") == result.plan


def test_a_plan_gives_the_optimizer_that_it_was_made_with() -> None:
    plan = make_plan(8, 4, workload={}, spec=TrainingSpec(optimizer="RMSprop"))
    optimizers = [fit(steps=1, plan=used)[0].optimizer for used in (plan, PLAN)]
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["RMSprop", "SGD"]
