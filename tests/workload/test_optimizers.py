from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from autoaccum.errors import WorkloadError
from autoaccum.workload.optimizers import find_optimizer, make_optimizer, needs_closure


def test_adamw_by_default_over_the_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    made = make_optimizer(None, model)
    assert type(made) is AdamW
    assert [p is q for p, q in zip(made.param_groups[0]["params"], model[1].parameters(), strict=True)] == [True, True]


@pytest.mark.parametrize("name", ["sgd", "AdamW", "ADAM", "rmsprop", "adagrad", "Adafactor", "nadam"])
def test_finds_names_whatever_their_case(name: str) -> None:
    assert isinstance(make_optimizer(name, nn.Linear(2, 2)), find_optimizer(name))


def test_takes_a_class_and_a_function() -> None:
    model = nn.Linear(2, 2)
    assert isinstance(make_optimizer(SGD, model), SGD)
    made = make_optimizer(
        lambda params: SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], lr=0.1), model
    )
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.5]


def test_only_a_closure_without_default_is_needed() -> None:
    assert needs_closure(torch.optim.LBFGS)
    assert not any(
        needs_closure(value)
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not torch.optim.LBFGS
    )


class Wanting(SGD):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate)


def _elsewhere(params: Any) -> Optimizer:
    return SGD(nn.Linear(1, 1).parameters())


BAD: dict[str, tuple[Any, str]] = {
    "instance": (SGD(nn.Linear(1, 1).parameters()), r"optimizer is an instance of SGD, bound to one model"),
    "several": ([SGD, AdamW], r"2 optimizers are given"),
    "several returned": (lambda params: (SGD(params), SGD(params)), r"2 optimizers are given"),
    "several by name": (lambda params: {"a": SGD(params)}, r"optimizer is a dict of 1"),
    "unknown": ("adamww", r"torch\.optim has no optimizer 'adamww': did you mean AdamW"),
    "unknown far": ("zzz", r"torch\.optim has no optimizer 'zzz': did you mean AdamW, SGD\?"),
    "closure": ("LBFGS", r"LBFGS needs a closure"),
    "closure made": (lambda params: torch.optim.LBFGS(params), r"LBFGS needs a closure"),
    "no callable": (3, r"optimizer is an int"),
    "no optimizer": (lambda params: params, r"optimizer\(params\) returned a list, not an"),
    "nothing returned": (lambda params: None, r"optimizer\(params\) returned None, not an optimizer"),
    "missing argument": (Wanting, r"Wanting\(params\) does not work here .*rate"),
    "another model's": (_elsewhere, r"holds no parameter of the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    optimizer, message = BAD[case]
    with pytest.raises(WorkloadError, match=message):
        make_optimizer(optimizer, nn.Linear(2, 2))


def test_refuses_a_model_that_cannot_learn() -> None:
    with pytest.raises(WorkloadError, match="ReLU has no parameters"):
        make_optimizer(None, nn.ReLU())
    with pytest.raises(WorkloadError, match="none of the 2 parameters of Linear is trainable"):
        make_optimizer(None, nn.Linear(2, 2).requires_grad_(False))
