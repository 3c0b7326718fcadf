"""Everything an Accumulator refuses, with one clear message each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.sources.objective import resolve_objective

MODEL = nn.Linear(3, 3)
SGD = torch.optim.SGD(MODEL.parameters())
MSE = nn.MSELoss()


def build(**changes: Any) -> Accumulator:
    arguments: dict[str, Any] = {"model": MODEL, "optimizer": SGD, "loss": MSE, "micro_batch": 4} | changes
    return Accumulator(**arguments)


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self) -> None:
        super().__init__(MODEL.parameters(), {})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def half_model(dtype: torch.dtype) -> dict[str, Any]:
    model = nn.Linear(3, 3).to(dtype)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "net"}, "model is a str: give an nn.Module"),
    "lazy model": ({"model": nn.LazyLinear(3)}, "parameter weight is not initialised yet: run the model"),
    "no optimizer": ({"optimizer": None}, "optimizer is a NoneType: give one torch.optim.Optimizer"),
    "several optimizers": ({"optimizer": [SGD, SGD]}, "optimizer is a list"),
    "lbfgs": ({"optimizer": torch.optim.LBFGS(MODEL.parameters())}, "LBFGS needs a closure"),
    "closure": ({"optimizer": NeedsClosure()}, "NeedsClosure needs a closure, which would run the model again"),
    "foreign optimizer": (
        {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
        "the SGD holds no parameter of the model",
    ),
    "micro_batch 0": ({"micro_batch": 0}, "micro_batch is 0: give a whole number of at least 1"),
    "micro_batch negative": ({"micro_batch": -3}, "micro_batch is -3"),
    "micro_batch float": ({"micro_batch": 2.5}, "micro_batch is 2.5"),
    "micro_batch text": ({"micro_batch": "8"}, "micro_batch is '8'"),
    "micro_batch bool": ({"micro_batch": True}, "micro_batch is True"),
    "clip_norm 0": ({"clip_norm": 0}, "clip_norm is 0: use a number above 0"),
    "clip_norm nan": ({"clip_norm": float("nan")}, "clip_norm is nan"),
    "clip_norm text": ({"clip_norm": "1"}, "clip_norm is '1'"),
    "precision": ({"precision": "int8"}, "there is no precision 'int8': choose fp32, bf16 or fp16"),
    "spec": ({"spec": "plan.json"}, "spec is a str, not a TrainingSpec: give a TrainingSpec, a Workload"),
    "plateau": ({"scheduler": ReduceLROnPlateau(SGD)}, "ReduceLROnPlateau needs a metric"),
    "scheduler": ({"scheduler": 3}, "scheduler is a int: give one of torch.optim.lr_scheduler"),
    "foreign scheduler": (
        {"scheduler": StepLR(torch.optim.SGD(MODEL.parameters()), 1)},
        "the scheduler belongs to another optimizer",
    ),
    "fp16 parameters": (
        {**half_model(torch.float16), "precision": "fp16"},
        "a GradScaler is used, and parameters are of float16: keep the parameters in float32",
    ),
    "bf16 parameters with a scaler": (
        {**half_model(torch.bfloat16), "scaler": torch.amp.GradScaler("cpu")},
        "a GradScaler is used, and parameters are of bfloat16",
    ),
    "objective and weight": ({"loss": resolve_objective(MSE), "weight": len}, "an Objective is given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_one_clear_message(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(UsageError) as refusal:
        build(**changes)
    assert str(refusal.value).startswith(message)
    assert refusal.value.hint
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("changes", [{"criterion": MSE}, {"reduction": "max"}, {"weight": 3}])
def test_errors_of_the_objective_are_raised(changes: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError):
        build(**changes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_similar_arguments_are_allowed(dtype: torch.dtype) -> None:
    assert build(**half_model(dtype), precision="bf16").micro_batch == 4
    assert build(**half_model(dtype), scaler=torch.amp.GradScaler("cpu", enabled=False)).micro_batch == 4
    assert build(loss=resolve_objective(MSE), micro_batch=torch.tensor(4)).micro_batch == 4
    assert build(scheduler=StepLR(SGD, 1), clip_norm=float("inf")).phase == "batch"


@pytest.mark.parametrize("window", [[], ()])
def test_an_empty_window_is_refused(window: Any) -> None:
    with pytest.raises(UsageError, match="no micro-batch"):
        build().step_parts(window)


def test_batches_that_cannot_be_split_are_refused_before_anything_runs() -> None:
    with pytest.raises(WorkloadError, match="has the length 3"):
        build().step((torch.ones(4, 3), torch.ones(3, 3)))
    with pytest.raises((UsageError, WorkloadError)):
        build().step((torch.ones(0, 3), torch.ones(0, 3)))


def test_a_coupled_loss_is_coupled_unless_that_is_refused() -> None:
    pair: dict[str, Any] = {
        "outputs": lambda model, batch: model(batch),
        "coupled_loss": lambda found, batch: found.std(),
    }
    assert build(loss=None, **pair).whole_batch == "recompute"
    assert build(loss=None, **pair, coupled=False).whole_batch is None
    assert build().whole_batch is None
