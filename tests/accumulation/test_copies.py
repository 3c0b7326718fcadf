from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.accumulation.state import StateCopy, TensorCopy


@pytest.mark.parametrize("on_host", [False, True])
def test_a_tensor_comes_back_in_place(on_host: bool) -> None:
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


def test_what_nothing_can_write_to_is_left_alone() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    for tensor in (inference, torch.ones(1).expand(5)):
        assert torch.equal(TensorCopy(tensor).restore(), torch.ones_like(tensor))


def test_a_nest_comes_back_in_place() -> None:
    tensor = torch.zeros(2)
    inner: dict[str, Any] = {"step": 1, "moment": tensor}
    nest = {"a": [1, inner, (tensor,)], "b": deque([1, 2]), "c": {3}, "d": "x"}
    nest["self"] = nest
    copy = StateCopy(nest)
    tensor += 1
    inner["step"] = 2
    inner["moment"] = torch.ones(5)
    inner["new"] = 3
    nest["a"].append(4)  # type: ignore[attr-defined]
    nest["b"].popleft()  # type: ignore[attr-defined]
    nest["c"].clear()  # type: ignore[attr-defined]
    del nest["d"]
    copy.restore()
    assert set(nest) == {"a", "b", "c", "d", "self"}
    assert nest["a"] == [1, inner, (tensor,)]
    assert (nest["b"], nest["c"], nest["d"]) == (deque([1, 2]), {3}, "x")
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


def test_an_optimizer_around_another_comes_back() -> None:
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


def test_a_sparse_tensor_comes_back_in_place() -> None:
    sparse = torch.eye(2).to_sparse()
    copy = StateCopy([sparse])
    sparse.zero_()
    copy.restore()
    assert torch.equal(sparse.to_dense(), torch.eye(2))


class Frozen(OrderedDict[str, Any]):
    """As a library's mapping may be: it refuses to be written to, and makes what it is asked for."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("frozen")

    clear = update

    def __getitem__(self, key: str) -> Any:
        raise TypeError("made on demand")


def test_a_mapping_of_a_library_and_a_module_are_left_alone() -> None:
    model, frozen = nn.Linear(1, 1), Frozen(a=1)
    nest = {"frozen": frozen, "model": model}
    copy = StateCopy(nest)
    model.eval()
    nest["frozen"] = Frozen()
    copy.restore()
    assert nest["frozen"] is frozen
    assert not model.training
