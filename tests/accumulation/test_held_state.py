"""State that runs change besides parameters: of modules, and of what the user's functions name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.held_state import HeldState

COUNTED = {"calls": 0}
TOTAL = 0.0
HISTORY = torch.zeros(3)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))
        self.hidden: Tensor | None = None
        self.calls = [0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        self.hidden = inputs.mean(0)
        self.calls[0] += 1
        self.late = 1
        self.register_buffer("more", torch.ones(1))
        return inputs


def count(value: float) -> None:
    global TOTAL
    COUNTED["calls"] += 1
    TOTAL += value
    HISTORY.add_(1)


def loss(model: nn.Module, batch: Any) -> Any:
    count(2.0)
    return model(batch)


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.values.append(1.0)
        return model(batch)


def test_a_module_is_put_back() -> None:
    model = Keeping()
    held = HeldState({"": model})
    assert held.changed() == []
    model(torch.ones(2, 2))
    model.eval()
    assert {"hidden", "calls", "late"} <= set(held.changed())
    held.restore()
    assert held.changed() == []
    assert (model.hidden, model.calls, model.training) == (None, [0], True)
    assert model.seen.tolist() == [0, 0]
    assert not hasattr(model, "late")
    assert not hasattr(model, "more")


def test_what_functions_name_is_put_back() -> None:
    held = HeldState({}, [loss])
    loss(nn.Identity(), 1)
    assert set(held.changed()) == {"COUNTED", "TOTAL", "HISTORY"}
    held.restore()
    assert (COUNTED, TOTAL, HISTORY.tolist()) == ({"calls": 0}, 0.0, [0, 0, 0])
    assert held.changed() == []


def closing() -> tuple[Callable[..., Any], Callable[[], int]]:
    calls = 0

    def inner(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return model(batch)

    return inner, lambda: calls


def test_closures_methods_and_partials_are_put_back() -> None:
    inner, calls = closing()
    meter = Meter()
    held = HeldState({}, [functools.partial(inner), meter.loss])
    inner(nn.Identity(), 1)
    meter.loss(nn.Identity(), 1)
    assert set(held.changed()) == {"calls", "values"}
    held.restore()
    assert (calls(), meter.values) == (0, [])


def test_parameters_are_left_alone() -> None:
    model = nn.Linear(1, 1)
    held = HeldState({"": model})
    with torch.no_grad():
        model.weight.fill_(7)
    held.restore()
    assert model.weight.item() == 7


class Classed(nn.Module):
    seen = 0
    calls: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        Classed.seen += 1
        self.calls.append(1)
        COUNTED["calls"] += 1
        return inputs


def test_what_classes_keep_and_methods_name_is_put_back() -> None:
    model = Classed()
    for held in (HeldState({"": model}), HeldState({}, classes_of=[model])):
        model(torch.ones(1))
        assert {"Classed.seen", "Classed.calls"} <= set(held.changed())
        held.restore()
        assert (Classed.seen, Classed.calls) == (0, [])
        COUNTED["calls"] = 0
