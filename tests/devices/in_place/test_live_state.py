"""Everything a trial may change, changed by hand: it comes back, and what does not is named."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.devices.in_place.keeper import LiveState


def build() -> tuple[Any, torch.optim.Optimizer]:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda *_: None)
    model[0].weight.register_hook(lambda grad: grad)
    groups: list[Any] = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[2].weight]}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model[2].bias.grad = None
    return model, optimizer


def other_buffers(model: Any) -> None:
    del model[1].running_var
    model[1].register_buffer("late", torch.ones(2))
    model[1].register_buffer("hidden", None, persistent=False)


def new_hooks(model: Any) -> None:
    model[0]._forward_hooks.clear()
    model[2].register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    model[2].register_full_backward_hook(lambda *_: None)
    model.register_state_dict_post_hook(lambda *_: None)
    model.register_load_state_dict_pre_hook(lambda *_: None)


def tensor_hooks(model: Any) -> None:
    model[0].weight._backward_hooks.clear()
    model[0].bias.register_hook(lambda grad: grad)
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def gradients(model: Any) -> None:
    model[0].weight.grad.mul_(2)
    model[0].bias.grad = None
    model[2].bias.grad = torch.ones(2)


def submodules(model: Any) -> None:
    model.add_module("3", nn.ReLU())
    model[0] = nn.Linear(3, 4)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "values": lambda model: setattr(model[0].weight, "data", model[0].weight.detach().double()),
    "a buffer": lambda model: setattr(model[1], "running_mean", model[1].running_mean.clone()),
    "other buffers": other_buffers,
    "new hooks": new_hooks,
    "tensor hooks": tensor_hooks,
    "gradients": gradients,
    "a mode": lambda model: model[0].eval(),
    "what is trained": lambda model: model[0].weight.requires_grad_(False),
    "submodules": submodules,
    "torch's generator": lambda _: torch.rand(3),
    "Python's generator": lambda _: random.random(),
    "NumPy's generator": lambda _: np.random.rand(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_trial_changes_in_a_model_comes_back(change: Callable[[Any], Any]) -> None:
    model, optimizer = build()
    linear, norm, last = model
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    kept = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    hooks = (dict(linear._forward_hooks), dict(linear.weight._backward_hooks))
    state = LiveState({"": model}, optimizer)
    change(model)
    assert state.differences()
    state.restore()
    assert state.differences() == []
    assert list(model) == [linear, norm, last]
    now = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    assert all(map(torch.equal, now, values))
    assert all(p.grad is grad and p.requires_grad is wanted for p, grad, wanted in kept)
    assert (dict(linear._forward_hooks), dict(linear.weight._backward_hooks)) == hooks
    assert all(module.training for module in model.modules())


def regroup(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[0]["note"] = 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def reorder(optimizer: Any) -> None:
    first = next(iter(optimizer.state))
    optimizer.state[first] = optimizer.state.pop(first)


def attach(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.note = 1
    optimizer.step = None


OF_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "a step": lambda optimizer: optimizer.step(),
    "no state": lambda optimizer: optimizer.state.clear(),
    "groups": regroup,
    "order": reorder,
    "attributes": attach,
}


@pytest.mark.parametrize("change", OF_OPTIMIZERS.values(), ids=OF_OPTIMIZERS)
def test_what_a_trial_changes_in_an_optimizer_comes_back(change: Callable[[Any], Any]) -> None:
    model, optimizer = build()
    keys, names = list(optimizer.state), list(vars(optimizer))
    rates = [group["lr"] for group in optimizer.param_groups]
    state = LiveState({"": model}, optimizer)
    change(optimizer)
    assert state.differences()
    state.restore()
    assert state.differences() == []
    assert all(a is b for a, b in zip(optimizer.state, keys, strict=True))
    assert list(vars(optimizer)) == names
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert not optimizer._optimizer_step_pre_hooks


def test_differences_are_named() -> None:
    model, optimizer = build()
    state = LiveState({"": model}, optimizer)
    with torch.no_grad():
        model[0].weight.add_(1)
        model[1].running_mean.add_(1)
    model[2].eval()
    torch.rand(1)
    assert set(state.differences()) == {
        "parameter 0.weight",
        "buffer 1.running_mean",
        "the mode of 2",
        "the optimizer's groups",
        "the optimizer's state",
        "the random state of torch",
    }


def test_tied_sparse_and_odd_tensors_come_back() -> None:
    model: Any = nn.ModuleDict({"a": nn.Embedding(4, 2, sparse=True), "b": nn.Linear(2, 4, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"](torch.tensor([1, 2])).sum().backward()
    model.register_buffer("wide", torch.ones(1).expand(5))
    model.register_buffer("small", torch.ones(4).to(torch.float8_e4m3fn))
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    gradient, dense = model["a"].weight.grad, model["a"].weight.grad.to_dense()
    state = LiveState({"": model}, None)
    with torch.no_grad():
        model["a"].weight.zero_()
    model._buffers["turned"].zero_()
    gradient.zero_()
    state.restore()
    assert state.differences() == []
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.grad is gradient
    assert torch.equal(gradient.to_dense(), dense)
    assert torch.equal(model._buffers["turned"], torch.arange(6.0).reshape(2, 3).t())


def test_an_old_style_weight_norm_comes_back() -> None:
    layer: Any = nn.Linear(2, 2)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer)
    state = LiveState({"": layer}, None)
    weight = layer.weight
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight is not weight
    state.restore()
    assert layer.weight is weight
    assert state.differences() == []


class Keeping(nn.Linear):
    """A user's own, with plain attributes and an object of a library."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table: Any = OrderedDict(a=1, b=2)
        self.calls, self.log, self.mask = 0, ["made"], torch.ones(2)
        self.fraction = Fraction(1, 2)


def test_plain_attributes_of_the_users_own_modules_come_back_and_are_told() -> None:
    layer: Any = Keeping()
    log, mask = layer.log, layer.mask
    state = LiveState({"net": layer}, None)
    layer.table.move_to_end("a")
    layer.calls += 1
    layer.log.append("called")
    layer.mask[0] = 0
    layer.late, layer.fraction = 1, Fraction(1, 3)
    assert set(state.changed_attributes()) == {"net.table", "net.calls", "net.log", "net.mask", "net.late"}
    state.restore()
    assert list(layer.table) == ["a", "b"]
    assert (layer.calls, layer.log, layer.mask.tolist()) == (0, ["made"], [1, 1])
    assert layer.log is log
    assert layer.mask is mask
    assert not hasattr(layer, "late")
    assert layer.fraction == Fraction(1, 3)


def test_attributes_of_a_librarys_modules_are_left_alone() -> None:
    layer: Any = nn.Linear(2, 2)
    state = LiveState({"": layer}, None)
    layer.in_features = 5
    assert state.changed_attributes() == state.differences() == []
    state.restore()
    assert layer.in_features == 5
