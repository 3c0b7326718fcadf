from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoaccum
from autoaccum.errors import WorkloadError
from autoaccum.workload.spec import Workload


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3), torch.randn(size, 2)


def make(**changes: Any) -> Workload:
    return Workload(**{"model": nn.Linear(3, 2), "batch": batch, "criterion": nn.MSELoss(), **changes})


def test_is_the_public_workload() -> None:
    assert autoaccum.Workload is Workload
    assert dataclasses.fields(Workload)[0].kw_only
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().name = "other"  # type: ignore[misc]


def test_an_instance_is_copied_each_time() -> None:
    workload = make()
    first, second = workload.build_model(), workload.build_model()
    assert first is not workload.model
    assert first is not second
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(workload.build_model().parameters()).any()


def test_a_model_at_rest_is_built_to_be_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    built: Any = make(model=model).build_model()
    assert (built.training, built[0].training, built[1].training) == (True, True, False)
    model.eval()
    for given in (model, lambda: copy.deepcopy(model)):
        workload = make(model=given)
        assert all(module.training for module in workload.build_model().modules())
        assert not workload.make_model().training
    assert not any(module.training for module in model.modules())


def test_a_copy_keeps_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)
            self.right.weight = self.left.weight

    built = make(model=Tied()).build_model()
    assert isinstance(built, Tied)
    assert built.left.weight is built.right.weight


def test_an_instance_that_cannot_be_copied_is_refused() -> None:
    class Stuck(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle 'generator' object")

    with pytest.raises(WorkloadError, match="an instance of Stuck, cannot be copied .*give a function that builds it"):
        make(model=Stuck(3, 2)).build_model()


def test_a_class_is_built() -> None:
    class Net(nn.Linear):
        def __init__(self, width: int = 3) -> None:
            super().__init__(width, 2)

    assert isinstance(make(model=Net).build_model(), Net)


def test_a_model_function_must_return_a_module() -> None:
    with pytest.raises(WorkloadError, match=r"model\(\) returned a dict: return an nn\.Module"):
        make(model=lambda: {}).build_model()


def test_a_batch_must_have_the_size_asked() -> None:
    assert len(make().build_batch(7)[0]) == 7
    with pytest.raises(WorkloadError, match=r"batch\(7\) returned 6 samples: return as many as asked: 7"):
        make(batch=lambda size: batch(size - 1)).build_batch(7)
    with pytest.raises(WorkloadError, match=r"batch\[1\] has 8 rows, batch\[0\] has 7"):
        make(batch=lambda size: (torch.zeros(size), torch.zeros(size + 1))).build_batch(7)
    with pytest.raises(WorkloadError, match=r"batch \(None\) holds nothing"):
        make(batch=lambda size: None).build_batch(7)


def test_what_the_users_code_raises_comes_through() -> None:
    def broken(size: int) -> Any:
        raise torch.OutOfMemoryError("as it is")

    with pytest.raises(torch.OutOfMemoryError, match="as it is"):
        make(batch=broken).build_batch(3)
    with pytest.raises(ZeroDivisionError):
        make(model=lambda: 1 // 0).build_model()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "model is a number": ({"model": 3}, r"model is an int: give an nn\.Module"),
    "model is a class": ({"model": dict}, r"model is the class dict, which is no nn\.Module"),
    "model wants more": ({"model": nn.Linear}, r"model\(in_features.*cannot be called without arguments"),
    "batch is a tensor": ({"batch": torch.zeros(3)}, r"batch is a Tensor: write a function batch\(size\)"),
    "batch wants two": ({"batch": lambda a, b: a}, r"batch\(a, b\) cannot be called with 1 argument"),
    "weight wants none": ({"weight": lambda: 1}, r"weight\(\) cannot be called with 1 argument"),
    "precision": ({"precision": "float16"}, r"the precision is 'float16': use one of fp32, bf16, fp16"),
    "batchnorm": (
        {"batchnorm": "exact"},
        r"no batchnorm mode 'exact': take one of \"micro\", \"running\", \"frozen\"",
    ),
    "reduction": ({"reduction": "none"}, r"the reduction is 'none': use \"mean\" or \"sum\""),
    "criterion and loss": ({"loss": nn.L1Loss()}, r"both loss and criterion are given"),
    "loss is a class": ({"criterion": None, "loss": nn.L1Loss}, r"loss is the class L1Loss: write loss = L1Loss\(\)"),
    "loss is a number": ({"criterion": None, "loss": 3}, r"loss is an int: write a function loss\(model, batch\)"),
    "criterion is a number": ({"criterion": 3}, r"the criterion is an int, which cannot be called"),
    "sum and weight": (
        {"criterion": nn.MSELoss(reduction="sum"), "weight": len},
        r"the loss is a sum, which nothing divides, and weight is given too",
    ),
    "trainable criterion": (
        {"criterion": nn.Sequential(nn.Linear(2, 2))},
        r"Sequential has trainable parameters \(0\.weight, 0\.bias\), which no optimizer would update",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_says_what_is_wrong(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(WorkloadError, match=message) as caught:
        make(**changes)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_builtins_without_a_signature_are_taken() -> None:
    assert copy.copy(make(weight=len)).objective.weight((torch.zeros(3), torch.zeros(3))) == 2.0
