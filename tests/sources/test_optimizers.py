from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from autoaccum.errors import WorkloadError
from autoaccum.sources.optimizers import (
    get_learning_rate,
    make_optimizer,
    needs_closure,
    scheduler_follows_rate,
    set_learning_rate,
)


def test_adamw_by_default_over_the_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    made = make_optimizer(None, model)
    assert type(made) is AdamW
    assert [p is q for p, q in zip(made.param_groups[0]["params"], model[1].parameters(), strict=True)] == [True, True]


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
    "several": ([SGD, AdamW], r"optimizer is a list"),
    "unknown": ("adamww", r"torch\.optim has no optimizer 'adamww': did you mean AdamW"),
    "closure": ("LBFGS", r"LBFGS needs a closure"),
    "no optimizer": (lambda params: params, r"optimizer\(params\) returned a list, not an"),
    "missing argument": (Wanting, r"Wanting\(params\) failed .*rate"),
    "another model's": (_elsewhere, r"holds no parameter of the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    optimizer, message = BAD[case]
    with pytest.raises(WorkloadError, match=message):
        make_optimizer(optimizer, nn.Linear(2, 2))


def test_refuses_a_model_that_cannot_learn() -> None:
    with pytest.raises(WorkloadError, match="none of the 0 parameters of ReLU"):
        make_optimizer(None, nn.ReLU())
    with pytest.raises(WorkloadError, match="none of the 2 parameters of Linear is trainable"):
        make_optimizer(None, nn.Linear(2, 2).requires_grad_(False))


RATES = st.floats(1e-8, 1e3)


def groups(*rates: Any, **options: Any) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates], lr=1.0, **options)


def rates(optimizer: Optimizer, key: str = "lr") -> list[float]:
    return [float(group[key]) for group in optimizer.param_groups]


@given(st.lists(RATES, min_size=1, max_size=4), RATES)
def test_the_first_group_has_the_rate_and_the_others_keep_their_ratio(own: list[float], rate: float) -> None:
    optimizer = groups(*own)
    assert get_learning_rate(optimizer) == own[0]
    set_learning_rate(optimizer, rate)
    assert get_learning_rate(optimizer) == rate
    assert rates(optimizer) == pytest.approx([rate * each / own[0] for each in own], rel=1e-12)


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    shared = torch.tensor(0.5)
    optimizer = groups(shared, torch.tensor(0.25), shared)
    before = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.0625, 0.125]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, before, strict=True))
    assert get_learning_rate(optimizer) == 0.125


def test_a_later_scheduler_starts_from_the_new_rate() -> None:
    optimizer = groups(0.4, 0.2)
    old = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    old.step()
    set_learning_rate(optimizer, 1.0)
    assert rates(optimizer) == rates(optimizer, "initial_lr") == [1.0, 0.5]
    assert lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).get_last_lr() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (0.0, r"the learning rate of the first parameter group of SGD is 0: give the first group an lr above 0"),
        (float("inf"), r"the first parameter group of SGD is inf"),
        (None, r"parameter group 0 of SGD has lr=None, so that no learning rate can be set: use an optimizer whose"),
        ("missing", r"parameter group 0 of SGD has no lr"),
    ],
)
def test_refuses_an_optimizer_without_a_learning_rate(first: Any, message: str) -> None:
    optimizer = groups(0.5, 0.25)
    optimizer.param_groups[0]["lr"] = first
    if isinstance(first, str):
        del optimizer.param_groups[0]["lr"]
    for ask in (get_learning_rate, lambda it: set_learning_rate(it, 1.0)):
        with pytest.raises(WorkloadError, match=message):
            ask(optimizer)
    assert optimizer.param_groups[1]["lr"] == 0.25


def chained(optimizer: Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2])


@pytest.mark.parametrize(
    ("make_scheduler", "is_followed"),
    [
        pytest.param(lambda it: None, True, id="none"),
        pytest.param(chained, True, id="chained"),
        pytest.param(lambda it: lr_scheduler.LambdaLR(it, lambda step: step / 1000), True, id="warm-up"),
        pytest.param(lr_scheduler.ReduceLROnPlateau, True, id="plateau"),
        pytest.param(lambda it: lr_scheduler.OneCycleLR(it, max_lr=1.0, total_steps=3), False, id="one-cycle"),
        pytest.param(lambda it: lr_scheduler.CyclicLR(it, 0.1, 1.0), False, id="cyclic"),
    ],
)
def test_finds_schedulers_that_overwrite_the_learning_rate(
    make_scheduler: Callable[[Optimizer], Any], is_followed: bool
) -> None:
    made: list[Optimizer] = []

    def make_optimizer() -> Optimizer:
        made.append(groups(0.5, 0.25, momentum=0.9))
        return made[-1]

    assert scheduler_follows_rate(make_optimizer, make_scheduler) is is_followed
    assert len(made) == 2
