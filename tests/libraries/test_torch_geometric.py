"""Graphs: `Batch` of torch_geometric, whose samples are not rows, cut by the workload's own functions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autoaccum
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import move_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")  # Of its import: a FutureWarning from torch 2.15 on.

FILE = """
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv, global_mean_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GraphConv(5, 16), GraphConv(16, 16), nn.Linear(16, 3)

    def forward(self, graphs):
        x = self.first(graphs.x, graphs.edge_index).relu()
        x = self.second(x, graphs.edge_index).relu()
        return self.head(global_mean_pool(x, graphs.batch, size=graphs.num_graphs))


def model():
    return Net()


def graph(number, nodes=None):
    nodes = 3 + number % 4 if nodes is None else nodes
    draw = torch.Generator().manual_seed(number)
    ring = torch.arange(nodes)
    return Data(
        x=torch.randn(nodes, 5, generator=draw),
        edge_index=torch.stack([ring, ring.roll(1)]),
        y=torch.randint(3, (1,), generator=draw),
    )


def batch(size):
    return Batch.from_data_list([graph(number, 6) for number in range(size)])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch), batch.y)


def split(batch, sizes):
    graphs = iter(batch.to_data_list())
    return [Batch.from_data_list([next(graphs) for _ in range(size)]) for size in sizes]


def size(batch):
    return batch.num_graphs
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "graphs.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def graphs(home: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "graphs"}
    exec(compile(FILE, str(home), "exec"), names)
    return names


def uneven(graphs: dict[str, Any], count: int) -> Any:
    made = graphs["Batch"].from_data_list([graphs["graph"](number) for number in range(count)])
    made.x = made.x.double()
    return made


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({"micro_batch": 4}, (4, 3, 3)),
        # Of 3, 4, 5, 6, 3 ... nodes.
        ({"micro_tokens": 12, "padding": "none", "lengths": lambda batch: batch.ptr.diff()}, (3, 2, 2, 2, 1)),
    ],
    ids=["graphs", "nodes"],
)
def test_an_update_is_the_full_batch_s(graphs: dict[str, Any], how: dict[str, Any], parts: tuple[int, ...]) -> None:
    whole = graphs["model"]().double()
    model = copy.deepcopy(whole)
    full = uneven(graphs, 10)
    graphs["loss"](whole, full).backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    optimizer, asked = torch.optim.SGD(model.parameters(), lr=0.5), {name: graphs[name] for name in ("split", "size")}
    accumulator = autoaccum.Accumulator(model, optimizer, graphs["loss"], **how, **asked)
    assert accumulator.step(full).micro_batches == parts
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters())
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-10 * largest
    accumulator.step_parts([uneven(graphs, 3), uneven(graphs, 6)])
    assert move_batch(full, "meta").x.is_meta
    assert not full.x.is_meta


def test_what_split_returns_is_checked(graphs: dict[str, Any]) -> None:
    model = graphs["model"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    asked: dict[str, Any] = {"micro_batch": 4, "size": graphs["size"]}
    wrong = autoaccum.Accumulator(model, optimizer, graphs["loss"], split=lambda batch, sizes: [batch], **asked)
    with pytest.raises(WorkloadError, match=r"split\(batch, \[4, 3, 3\]\) returned parts of \[10\] samples"):
        wrong.step(uneven(graphs, 10))

    def backwards(batch: Any, sizes: list[int]) -> Any:
        return graphs["split"](batch, sizes[::-1])

    wrong = autoaccum.Accumulator(model, optimizer, graphs["loss"], split=backwards, **asked)
    with pytest.raises(WorkloadError, match=r"returned parts of \[3, 3, 4\] samples"):
        wrong.step(uneven(graphs, 10))
    without = autoaccum.Accumulator(model, optimizer, graphs["loss"], micro_batch=4)
    with pytest.raises(WorkloadError, match="a DataBatch") as error:
        without.step(uneven(graphs, 10))
    assert error.value.hint is not None
    assert "split(batch, sizes) and size(batch)" in error.value.hint


def test_is_planned_and_verified(graphs: dict[str, Any]) -> None:
    model = graphs["model"]()
    asked = {name: graphs[name] for name in ("loss", "split", "size")}
    found = autoaccum.plan(model=model, batch=graphs["batch"], target_batch=12, max_micro_batch=5, **asked)
    assert found.micro_batches == (4, 4, 4)
    sample = graphs["batch"](8)
    found = autoaccum.plan(model=model, batch=sample, target_batch=8, max_micro_batch=4, **asked)
    assert found.micro_batches == (4, 4)
    with pytest.raises(WorkloadError, match="the sample batch has 8 samples, 9 are asked for"):
        autoaccum.plan(model=model, batch=sample, target_batch=9, **asked)
    verified = autoaccum.verify(model=model, batch=graphs["batch"], target_batch=7, micro_batch=3, **asked)
    assert verified.equivalent
    assert (verified.precision, [one.micro_batches for one in verified.comparisons]) == ("fp64", [(3, 2, 2), (3, 2)])


@pytest.mark.parametrize("form", ["loader", "batches", "stream"])
def test_is_trained(graphs: dict[str, Any], form: str) -> None:
    from torch_geometric.loader import DataLoader

    data = [graphs["graph"](number) for number in range(22)]
    loader = DataLoader(data, batch_size=5)
    stream = type("Stream", (), {"__iter__": lambda _: iter(loader)})()  # Batches that can only be gone through.
    given: Any = {"loader": loader, "batches": list(loader), "stream": stream}[form]
    usual: Any = {"optimizer": "SGD", "learning_rate": 0.1, "epochs": 1, "progress": False}
    model = graphs["model"]()
    plain = copy.deepcopy(model)
    found = autoaccum.fit(
        model,
        given,
        target_batch=8,
        micro_batch=None if form == "loader" else 4,
        eval_data=list(loader),
        **{name: graphs[name] for name in ("loss", "split", "size")},
        **usual,
    )
    assert (found.updates, found.samples) == (3, 22)
    assert (found.plan is not None) == (form == "loader")
    assert found.evaluation is not None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in range(0, 22, 8):
        optimizer.zero_grad()
        graphs["loss"](plain, graphs["Batch"].from_data_list(data[start : start + 8])).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_weight_of_nodes_is_named(graphs: dict[str, Any]) -> None:
    def of_nodes(model: Any, batch: Any) -> Tensor:
        return torch.as_tensor((model.first(batch.x, batch.edge_index) ** 2).mean())

    def drawn(size: int) -> Any:
        return graphs["Batch"].from_data_list([graphs["graph"](number) for number in range(size)])

    asked = {"split": graphs["split"], "size": graphs["size"]}
    found = autoaccum.verify(model=graphs["model"](), batch=drawn, loss=of_nodes, **asked)
    (cause,) = found.causes
    assert cause.change.facts["code"] in {f'len(batch["{name}"])' for name in ("x", "batch")}
    weighted = {"weight": lambda batch: batch.num_nodes, **asked}
    assert autoaccum.verify(model=graphs["model"](), batch=drawn, loss=of_nodes, **weighted).equivalent
