"""Tensors, also sparse ones, and nested structures are restored in place."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
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


pytestmark = pytest.mark.filterwarnings("ignore:Sparse ")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "uncoalesced": lambda dense: torch.sparse_coo_tensor(
        torch.cat([dense.nonzero().t()] * 2, 1), torch.cat([dense[dense != 0]] * 2), dense.shape, check_invariants=True
    ),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
}


class Graph(nn.Module):
    """Multiplies samples by a graph in a buffer, which each forward changes."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(3, 2)
        self.register_buffer("graph", make(torch.tensor([[0.0, 1, 0], [1, 0, 2], [0, 0, 1]])))

    def forward(self, x: Tensor) -> Tensor:
        graph: Any = self.graph
        with torch.no_grad():
            graph.mul_(0.9)
        return torch.as_tensor(self.inner((graph @ x.t()).t()))


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr"])
@pytest.mark.filterwarnings("ignore:forward updates the buffers")
def test_out_of_memory_undoes_a_step_over_sparse_batches(out_of_memory_at: Any, layout: str) -> None:
    batch = torch.randn(8, 3), torch.randn(8, 2)
    for number in itertools.count(0, 5):
        model = Graph(LAYOUTS[layout])
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accumulator = Accumulator(model, made, criterion=nn.MSELoss(), micro_batch=3, recover=False)
        before, graph = state_digest(model, made), model.graph
        with out_of_memory_at(number) as injected:
            try:
                accumulator.step(batch)
            except torch.OutOfMemoryError:
                assert injected.fired
        assert model.graph is graph
        assert (state_digest(model, made) == before) == injected.fired
        if not injected.fired:
            break
    assert number > 20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_host", [False, True])
def test_a_sparse_tensor_is_restored_in_place(layout: str, on_host: bool) -> None:
    tensor = LAYOUTS[layout](torch.eye(4))
    dense = tensor.to_dense()
    # In place, PyTorch cannot restore another number of elements of a compressed tensor.
    for change in (Tensor.zero_, _triple) if tensor.layout is torch.sparse_coo else (_triple,):
        copy = TensorCopy(tensor, on_host=on_host)
        change(tensor)
        for _ in range(2):
            assert copy.restore() is tensor
            assert torch.equal(tensor.to_dense(), dense)


def _triple(sparse: Tensor) -> Tensor:
    return sparse.mul_(3)
