"""Tensors, also sparse ones, and nested structures are restored in place."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.accumulation.transaction import StateCopy, TensorCopy


@pytest.mark.parametrize("on_host", [False, True])
def test_a_tensor_is_restored_in_place(on_host: bool) -> None:
    tensor = nn.Parameter(torch.randn(3, 4).t())
    values, address = tensor.detach().clone(), tensor.data_ptr()
    copy = TensorCopy(tensor, on_host=on_host)
    with torch.no_grad():
        tensor.zero_()
    tensor.data = torch.ones(2)
    assert copy.restore() is tensor
    assert torch.equal(tensor, values)
    assert tensor.data_ptr() == address
    assert tensor.stride() == (1, 4)


def test_a_nested_structure_is_restored_in_place() -> None:
    tensor = torch.zeros(2)
    inner: dict[str, Any] = {"step": 1, "moment": tensor}
    tree = {"a": [1, inner, (tensor,)], "b": deque([1, 2]), "c": {3}, "d": "x"}
    tree["self"] = tree
    copy = StateCopy(tree)
    tensor += 1
    inner["step"] = 2
    inner["moment"] = torch.ones(5)
    inner["new"] = 3
    tree["a"].append(4)  # type: ignore[attr-defined]
    tree["b"].popleft()  # type: ignore[attr-defined]
    tree["c"].clear()  # type: ignore[attr-defined]
    del tree["d"]
    copy.restore()
    assert set(tree) == {"a", "b", "c", "d", "self"}
    assert tree["a"] == [1, inner, (tensor,)]
    assert (tree["b"], tree["c"], tree["d"]) == (deque([1, 2]), {3}, "x")
    assert set(inner) == {"step", "moment"}
    assert inner["step"] == 1
    assert inner["moment"] is tensor
    assert torch.equal(tensor, torch.zeros(2))


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, with state in attributes of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.inner, self.count = inner, 0
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.inner.step()
        for slow in self.slow:
            slow.mul_(0.5)


def test_an_optimizer_around_another_is_restored() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    outer = Lookahead(inner)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    slow = [tensor.clone() for tensor in outer.slow]
    copy = StateCopy([outer, None])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    outer.step()
    assert len(inner.state) == 2
    copy.restore()
    assert len(inner.state) == 0
    assert outer.count == 0
    assert all(map(torch.equal, model.parameters(), before))
    assert all(map(torch.equal, outer.slow, slow))
