"""Models that keep a sparse tensor, such as the adjacency of a graph, train as any other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.changes import state_digest
from autoaccum.accumulation.state import TensorCopy, tensor_bytes

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
    """Passes its samples along a graph that it changes as it goes."""

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
def test_a_shortage_leaves_nothing_of_a_step(shortage_at: Any, layout: str) -> None:
    batch = torch.randn(8, 3), torch.randn(8, 2)
    for number in itertools.count(0, 5):
        model = Graph(LAYOUTS[layout])
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accumulator = Accumulator(model, made, criterion=nn.MSELoss(), micro_batch=3, recover=False)
        before, graph = state_digest(model, made), model.graph
        with shortage_at(number) as injected:
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
def test_a_sparse_tensor_comes_back_in_place(layout: str, on_host: bool) -> None:
    tensor = LAYOUTS[layout](torch.eye(4))
    dense = tensor.to_dense()
    # torch gives a compressed tensor no way back from another number of elements in place.
    for change in (Tensor.zero_, _triple) if tensor.layout is torch.sparse_coo else (_triple,):
        copy = TensorCopy(tensor, on_host=on_host)
        change(tensor)
        for _ in range(2):
            assert copy.restore() is tensor
            assert torch.equal(tensor.to_dense(), dense)


def test_the_indices_of_a_sparse_tensor_are_counted() -> None:
    dense = torch.eye(4)
    assert tensor_bytes(dense) == 64
    assert tensor_bytes(dense.to_sparse()) == 4 * 2 * 8 + 4 * 4
    assert tensor_bytes(dense.to_sparse_csr()) == (5 + 4) * 8 + 4 * 4


def _triple(sparse: Tensor) -> Tensor:
    return sparse.mul_(3)
