"""Invalid requests are refused in one line before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_plan, make_token_budget
from small_classifier import layers_file
from small_fit import fit as fit_small
from torch import nn
from torch.utils.data import TensorDataset

from autoaccum.errors import AutoaccumError, UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.sources.workload import Workload
from autoaccum.training.fit_events import FitResult
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.training_setup import TrainingSetup

DATA = TensorDataset(torch.ones(16, 3), torch.ones(16, 2))
OPTIMIZER = torch.optim.SGD(nn.Linear(1, 1).parameters())
DATASET = "dataset = [(torch.ones(3), torch.ones(2))] * 16\n"


def workload(**fields: Any) -> Workload:
    return Workload(
        model=lambda: nn.Linear(3, 2),
        batch=lambda size: (torch.ones(size, 3), torch.ones(size, 2)),
        criterion=nn.MSELoss(),
        **fields,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_batch": 0}, "target_batch is 0: give a whole number of at least 1"),
        ({"epochs": None}, "neither epochs nor steps are given: give epochs=3"),
        ({"workers": -1}, "workers is -1: give a whole number of at least 0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0: give a number above 0"),
        ({"ema_decay": 1.5}, "ema_decay is 1.5: give a number above 0 and below 1"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"learning_rate": 0}, "learning_rate is 0: give a number above 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"eval_due": 3}, "eval_due is 3: give a function of the samples trained on so far"),
        ({"resume": "yes"}, "there is no way to resume 'yes'"),
        ({"resume": "must"}, 'resume is "must", and there is no run_dir'),
        ({"skip_nonfinite": 1}, "skip_nonfinite is 1: give True or False"),
        ({"check": "loose"}, "there is no check 'loose': choose warn, strict or off"),
        ({"callbacks": [3]}, "callbacks are"),
        ({"run_dir": 3}, "run_dir is 3: give the name of a folder"),
        ({"plan": "plan.json", "micro_batch": 4}, "micro_batch is 4, and plan is given too"),
        ({"savers": "auto", "micro_batch": 4}, "and a plan or a micro-batch is given: leave one of them out"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"model_or_workload": nn.Linear(3, 2), "target_batch": 8, "epochs": 1}
    given = settings | options
    model_or_workload = given.pop("model_or_workload")
    with pytest.raises(UsageError) as caught:
        FitRequest.of(model_or_workload, given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_or_workload", "options", "message"),
    [
        (nn.Linear(3, 2), {"loss": nn.MSELoss()}, "a model is given, and no data"),
        (nn.Linear(3, 2), {"loss": nn.MSELoss(), "data": DATA, "device": "gpu"}, "there is no device 'gpu'"),
        (nn.LazyLinear(2), {"loss": nn.MSELoss(), "data": DATA}, "is not initialised yet"),
        (3, {"loss": nn.MSELoss(), "data": DATA}, "model_or_workload is an int"),
        (workload(dataset=DATA), {"loss": nn.MSELoss()}, "a workload is given, and loss too"),
        (workload(dataset=DATA), {"reduction": "sum"}, "a workload is given, and reduction too"),
        (workload(), {}, "has no dataset to train on: define dataset"),
        (workload(dataset=DATA), {"overrides": {"WIDTH": 3}}, "WIDTH cannot be set (--set)"),
        (nn.Linear(3, 2), {"data": DATA, "overrides": {"WIDTH": 3}}, "WIDTH cannot be set (--set)"),
        (
            workload(dataset=DATA),
            {"optimizer": OPTIMIZER},
            "is an instance of SGD, bound to one model",
        ),
        ("nowhere.py", {}, "there is no file nowhere.py"),
    ],
)
def test_setups_that_cannot_be_trained(model_or_workload: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoaccumError) as caught:
        TrainingSetup(FitRequest.of(model_or_workload, {"target_batch": 8, "epochs": 1, **options}))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def fit(model_or_workload: Any, data: Any = None, **options: Any) -> FitResult:
    return fit_small(model_or_workload, data, **{"micro_batch": 3, "epochs": 2} | options)[0]


def test_a_workload_brings_its_own_data_optimizer_and_schedule() -> None:
    spec = workload(
        dataset=DATA,
        evaluation_dataset=DATA,
        evaluate=lambda model, batch: {"size": float(len(batch[0]))},
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        precision="bf16",
    )
    result = fit(spec)
    assert isinstance(result.optimizer, torch.optim.SGD)
    assert result.optimizer.param_groups[0]["lr"] == 1 / 16
    assert result.evaluation is not None
    assert result.evaluation["size"] == pytest.approx((3 * 3 * 5 + 1) / 16)
    assert fit(spec, optimizer="Adagrad").optimizer.__class__ is torch.optim.Adagrad


def test_a_workload_s_list_holds_samples_and_a_list_given_as_data_holds_batches(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(layers_file(3, 2) + DATASET)
    assert fit(str(path)).samples == 32
    assert fit(path, [(torch.ones(10, 3), torch.ones(10, 2))] * 2).samples == 40


def test_a_file_that_changed_between_two_runs_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(layers_file(3, 2) + DATASET)
    assert fit(path, run_dir=tmp_path / "run").warnings == ()
    assert fit(path, run_dir=tmp_path / "run", epochs=3).warnings == ()
    path.write_text(path.read_text() + "\nunused = 3\n")
    (warning,) = fit(path, run_dir=tmp_path / "run", epochs=4).warnings
    assert (warning.code, warning.facts["name"]) == ("code_changed", "train")


def test_a_run_folder_is_relative_to_where_fit_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    leaving = f"import os\nos.chdir('elsewhere')\n{DATASET}"
    (tmp_path / "train.py").write_text(layers_file(3, 2) + leaving)
    fit("train.py", run_dir="run")
    assert (tmp_path / "run" / "model.pt").is_file()
    assert not (tmp_path / "elsewhere" / "run").exists()


def test_a_scheduler_function_that_returns_none_is_refused() -> None:
    for more in ({"scheduler": lambda optimizer: None}, {}):
        options = {} if more else {"scheduler": lambda optimizer: None}
        with pytest.raises(AutoaccumError, match=r"scheduler\(optimizer\) returned None: return the scheduler"):
            fit(workload(dataset=DATA, **more), **options)


@pytest.mark.parametrize(
    ("plan", "given", "update"),
    [
        (make_plan(8, 3), {}, (8, None)),
        (make_plan(8, 3), {"target_tokens": 64}, (None, 64)),  # Refused later, since the plan is for another update.
        (make_plan(8, 3, tokens=make_token_budget(target_tokens=64)), {}, (None, 64)),
    ],
)
def test_a_plan_says_what_an_update_is_unless_it_is_given(
    plan: Plan, given: dict[str, Any], update: tuple[int | None, int | None]
) -> None:
    request = FitRequest.of(nn.Linear(3, 2), {"plan": plan, "epochs": 1, **given})
    assert (request.target_batch, request.target_tokens) == update
