from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

import autoaccum
from autoaccum.errors import WorkloadError
from autoaccum.sources.samples import apply_spec
from autoaccum.sources.workload import Workload


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3), torch.randn(size, 2)


def make(**changes: Any) -> Workload:
    return Workload(**{"model": nn.Linear(3, 2), "batch": batch, "criterion": nn.MSELoss(), **changes})


def test_an_instance_is_copied_each_time() -> None:
    workload = make()
    first, second = workload.build_model(), workload.build_model()
    assert first is not workload.model
    assert first is not second
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(workload.build_model().parameters()).any()


def test_a_model_in_eval_mode_is_built_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    built: Any = make(model=model).build_model()
    assert (built.training, built[0].training, built[1].training) == (True, True, False)
    model.eval()
    for source in (model, lambda: copy.deepcopy(model)):
        workload = make(model=source)
        assert all(module.training for module in workload.build_model().modules())
        assert not workload.make_model().training
    assert not any(module.training for module in model.modules())


def test_an_instance_that_cannot_be_copied_is_refused() -> None:
    class Stuck(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle 'generator' object")

    with pytest.raises(WorkloadError, match="an instance of Stuck, cannot be copied .*give a function that builds it"):
        make(model=Stuck(3, 2)).build_model()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "model is a number": ({"model": 3}, r"model is an int: give an nn\.Module"),
    "batch is a tensor": ({"batch": torch.zeros(3)}, r"batch is a Tensor: write def batch\(size\)"),
    "model wants more": ({"model": nn.Linear}, r"model\(in_features.*cannot be called as model\(\)"),
    "batchnorm": (
        {"batchnorm": "whole"},
        r"no batchnorm mode 'whole': choose micro, running, frozen or exact",
    ),
    "criterion and loss": ({"loss": nn.L1Loss()}, r"both loss and criterion are given"),
    "sum and weight": (
        {"criterion": nn.MSELoss(reduction="sum"), "weight": len},
        r"the loss is a sum, so its parts need no weight, but weight is given",
    ),
    "trainable criterion": (
        {"criterion": nn.Sequential(nn.Linear(2, 2))},
        r"the criterion has trainable parameters \(0\.weight\), which no optimizer would update",
    ),
    "ema": ({"ema": "yes"}, "ema is 'yes': give True or False"),
    "evaluation batch": ({"evaluation_batch": 0}, "evaluation_batch is 0: give a whole number of at least 1"),
    "evaluate": ({"evaluation_batch": 2, "evaluate": 3}, r"evaluate is an int: write def evaluate\(model, batch\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_says_what_is_wrong(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(WorkloadError, match=message) as caught:
        make(**changes)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_settings_replace_the_workloads_own() -> None:
    workload = make(hold_outputs=True, evaluation_batch=4)
    assert apply_spec(workload, {}) == workload
    changed = apply_spec(workload, {"ema": True, "evaluation_batch": 8, "precision": "bf16"})
    assert (changed.ema, changed.evaluation_batch, changed.precision) == (True, 8, "bf16")
    assert apply_spec(workload, {"ema": False}).ema is False


def test_an_invalid_scheduler_is_refused_when_it_is_built() -> None:
    workload = make(scheduler=3)
    with pytest.raises(WorkloadError, match="scheduler is an int: write def scheduler"):
        workload.build_scheduler(torch.optim.SGD(workload.build_model().parameters()))


class Watched(nn.Module):
    """A model that stores its attention and an auxiliary loss, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).softmax(-1)
        self.attention, self.seen = hidden, [hidden.square().mean()]
        return torch.as_tensor(self.second(hidden))


@pytest.mark.parametrize("normed", [False, True], ids=["attention", "weight_norm"])
def test_a_live_model_is_verified_after_it_has_run(normed: bool) -> None:
    model: nn.Module = Watched()
    if normed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = nn.Sequential(weight_norm(nn.Linear(4, 1)))
    model(torch.ones(2, 4))
    batch = torch.randn(7, 4), torch.randn(7, 1)
    assert autoaccum.verify(model=model, batch=batch, loss=nn.MSELoss(), target_batch=7, micro_batch=3).equivalent
    assert Workload(model=model, batch=lambda size: batch, loss=nn.MSELoss()).build_model() is not model
