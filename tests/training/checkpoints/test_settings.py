"""What is set anew before a run is resumed wins, is told, and is not told twice; a schedule goes on as it was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.accumulation.digest import state_digest
from autoaccum.errors import UsageError
from autoaccum.training.events import Noted, Updated

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X[:, :2] * 2)


def run(folder: Path, make: Callable[[Any], Optimizer], steps: int, scheduler: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    rates: list[float | None] = []
    said: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, Updated):
            rates.append(event.learning_rate)
        elif isinstance(event, Noted):
            said.append(event.text)

    given: dict[str, Any] = {"target_batch": 8, "micro_batch": 4, "loss": nn.MSELoss(), "progress": False}
    given |= {"run_dir": folder, "steps": steps, "optimizer": make, "scheduler": scheduler, "callbacks": [listen]}
    result = autoaccum.fit(nn.Linear(3, 2), DATA, **given | options)
    return result, rates, said


def sgd(**settings: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: SGD(parameters, **{"lr": 0.1, "momentum": 0.9} | settings)


def adamw(**settings: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: AdamW(parameters, **{"lr": 0.1} | settings)


def two_groups(rate: float) -> Callable[[Any], Optimizer]:
    def make(parameters: Any) -> Optimizer:
        weight, bias = parameters
        groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": rate}]
        return SGD(groups, lr=0.1)

    return make


def test_what_is_set_anew_wins_and_is_told_once(tmp_path: Path) -> None:
    run(tmp_path, sgd(), 2)
    result, rates, said = run(tmp_path, sgd(lr=0.01, weight_decay=0.5), 4)
    assert rates == [0.01, 0.01]
    assert result.optimizer.param_groups[0]["weight_decay"] == 0.5
    expected = "lr is 0.01 from here on (it was 0.1); weight_decay is 0.5 from here on (it was 0)"
    assert said == [f"in the resumed run, {expected}"]
    assert run(tmp_path, sgd(lr=0.01, weight_decay=0.5), 6)[1:] == ([0.01, 0.01], [])
    assert run(tmp_path, sgd(lr=0.1, weight_decay=0.5), 7)[1] == [0.1]


def test_a_setting_that_training_changed_is_kept_where_nothing_was_set_anew(tmp_path: Path) -> None:
    def halve(event: Any) -> None:
        if isinstance(event, Updated):
            optimizer.param_groups[0]["lr"] /= 2

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"target_batch": 8, "micro_batch": 4, "loss": nn.MSELoss(), "progress": False}
    for steps in (1, 2):
        result = autoaccum.fit(
            model, DATA, run_dir=tmp_path, steps=steps, optimizer=optimizer, callbacks=[halve], **options
        )
        assert result.warnings == ()
    assert run(tmp_path, lambda parameters: SGD(parameters, lr=0.1), 3)[1:] == ([0.025], [])


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (two_groups(0.1), two_groups(0.5), "lr is 0.5 from here on (it was 0.1) in parameter group 1"),
        (adamw(), adamw(betas=(0.8, 0.99)), "betas is (0.8, 0.99) from here on (it was (0.9, 0.999))"),
        (adamw(), adamw(amsgrad=True), "amsgrad stays False: it has no state to go on from"),
        (adamw(amsgrad=True), adamw(), "amsgrad is False from here on (it was True)"),
        (adamw(foreach=False), adamw(fused=True, foreach=False), "fused is True from here on (it was None)"),
        (
            lambda parameters: RMSprop(parameters),
            lambda parameters: RMSprop(parameters, momentum=0.5),
            "momentum stays 0: it has no state to go on from",
        ),
        (adamw(lr=torch.tensor(0.5)), adamw(lr=torch.tensor(0.25)), "lr is 0.25 from here on (it was 0.5)"),
        (adamw(lr=0.5), adamw(lr=torch.tensor(0.25)), "lr is 0.25 from here on (it was 0.5)"),
    ],
    ids=["one group", "betas", "amsgrad", "no amsgrad", "fused", "momentum", "tensor", "to a tensor"],
)
def test_every_kind_of_setting(tmp_path: Path, first: Any, then: Any, told: str) -> None:
    run(tmp_path, first, 2)
    result, _, said = run(tmp_path, then, 4)
    assert said == [f"in the resumed run, {told}"]
    assert result.updates == 4


def warm(total: int, milestone: int = 2) -> Callable[[Optimizer], Any]:
    return lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(optimizer, total)],
        [milestone],
    )


@pytest.mark.parametrize(
    ("make", "schedule", "told"),
    [
        (sgd(), warm(8), ""),
        (sgd(lr=0.01), warm(8), "lr=0.01 that is given now is not used"),
        (sgd(), warm(9), "T_max=9 that is given now is not used"),
        (sgd(lr=0.01), warm(9, 3), "lr=0.01, milestones=[3], T_max=9 that are given now are not used"),
    ],
    ids=["the same", "lr", "T_max", "all"],
)
def test_a_schedule_goes_on_as_it_was_kept(tmp_path: Path, make: Any, schedule: Any, told: str) -> None:
    whole, rates, _ = run(tmp_path / "whole", sgd(), 8, warm(8))
    run(tmp_path / "parts", sgd(), 5, warm(8))
    run(tmp_path / "parts", make, 6, schedule)
    resumed, later, said = run(tmp_path / "parts", make, 8, schedule)
    assert later == rates[6:]
    assert state_digest(resumed.model, resumed.optimizer) == state_digest(whole.model, whole.optimizer)
    assert said == ([f"in the resumed run, the schedule goes on: {told}"] if told else [])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: schedules.MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: schedules.LambdaLR(optimizer, lambda update: 0.5**update),
        lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
    ],
    ids=["one cycle", "steps", "lambda", "restarts"],
)
def test_nothing_is_told_where_nothing_was_set_anew(tmp_path: Path, schedule: Any) -> None:
    assert run(tmp_path, sgd(), 3, schedule)[2] == []
    assert run(tmp_path, sgd(), 6, schedule)[2] == []
    again, _, said = run(tmp_path, sgd(weight_decay=0.5), 7, schedule)
    assert said == ["in the resumed run, weight_decay is 0.5 from here on (it was 0)"]
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.5


class Stateless:
    def step(self) -> None:
        pass


def test_a_schedule_without_state_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the Stateless has no state_dict and no load_state_dict, so that no run fold"):
        run(tmp_path, sgd(), 3, Stateless())
    assert not [*(tmp_path / "checkpoints").iterdir()]
    assert run(tmp_path, sgd(), 3, Stateless(), run_dir=None)[0].updates == 3
