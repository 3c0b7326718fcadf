"""Graphs: `Batch` of torch_geometric, whose samples are not rows, cut by the workload's own functions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from imported_files import import_file
from torch import Tensor

import autoaccum
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import move_batch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")  # Of its import: a FutureWarning from torch 2.15 on.

IMPORTED = ("torch_geometric.nn", "torch_geometric.loader")
NAMES = ("loss", "split", "size")


@pytest.fixture(scope="module")
def gnn() -> Any:
    return import_file(Path(__file__).parent / "models" / "gnn.py")


def graphs_of(gnn: Any, count: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return rings of 3, 4, 5, 6, 3 ... nodes."""
    made = []
    for number in range(count):
        draw, ring = torch.Generator().manual_seed(number), torch.arange(3 + number % 4)
        x = torch.randn(len(ring), 8, generator=draw).to(dtype)
        y = torch.randint(3, (1,), generator=draw)
        made.append(gnn.Data(x=x, edge_index=torch.stack([ring, ring.roll(1)]), y=y))
    return made


def uneven(gnn: Any, count: int) -> Any:
    return gnn.Batch.from_data_list(graphs_of(gnn, count, torch.float64))


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ({"micro_batch": 4}, (4, 3, 3)),
        ({"micro_tokens": 12, "padding": "none", "lengths": lambda batch: batch.ptr.diff()}, (3, 2, 2, 2, 1)),
    ],
    ids=["graphs", "nodes"],
)
def test_an_update_is_the_full_batch_s(gnn: Any, how: dict[str, Any], parts: tuple[int, ...]) -> None:
    whole = gnn.Net().double()
    model = copy.deepcopy(whole)
    full = uneven(gnn, 10)
    gnn.loss(whole, full).backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    accumulator = autoaccum.Accumulator(model, optimizer, gnn.loss, **how, split=gnn.split, size=gnn.size)
    assert accumulator.step(full).micro_batches == parts
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters())
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-10 * largest
    accumulator.step_parts([uneven(gnn, 3), uneven(gnn, 6)])
    assert move_batch(full, "meta").x.is_meta
    assert not full.x.is_meta


def test_what_split_returns_is_checked(gnn: Any) -> None:
    model = gnn.Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wrong: dict[str, Any] = {
        r"split\(batch, \[4, 3, 3\]\) returned parts of \[10\] samples": lambda batch, sizes: [batch],
        r"returned parts of \[3, 3, 4\] samples": lambda batch, sizes: gnn.split(batch, sizes[::-1]),
    }
    for told, split in wrong.items():
        accumulator = autoaccum.Accumulator(model, optimizer, gnn.loss, micro_batch=4, split=split, size=gnn.size)
        with pytest.raises(WorkloadError, match=told):
            accumulator.step(uneven(gnn, 10))
    without = autoaccum.Accumulator(model, optimizer, gnn.loss, micro_batch=4)
    with pytest.raises(WorkloadError, match="a DataBatch") as error:
        without.step(uneven(gnn, 10))
    assert error.value.hint is not None
    assert "split(batch, sizes) and size(batch)" in error.value.hint


def test_a_sample_batch_has_to_hold_the_target(gnn: Any) -> None:
    asked = {name: getattr(gnn, name) for name in NAMES}
    with pytest.raises(WorkloadError, match="the sample batch has 8 samples, 9 are asked for"):
        autoaccum.plan(model=gnn.Net(), batch=gnn.batch(8), target_batch=9, **asked)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("form", ["loader", "batches", "stream"])
def test_is_trained(gnn: Any, form: str) -> None:
    from torch_geometric.loader import DataLoader

    data = graphs_of(gnn, 22)
    loader = DataLoader(data, batch_size=5)
    stream = type("Stream", (), {"__iter__": lambda _: iter(loader)})()  # Batches that can only be gone through.
    given: Any = {"loader": loader, "batches": list(loader), "stream": stream}[form]
    usual: Any = {"optimizer": "SGD", "learning_rate": 0.1, "epochs": 1, "progress": False}
    model = gnn.Net()
    plain = copy.deepcopy(model)
    found = autoaccum.fit(
        model,
        given,
        target_batch=8,
        micro_batch=None if form == "loader" else 4,
        eval_data=list(loader),
        **{name: getattr(gnn, name) for name in NAMES},
        **usual,
    )
    assert (found.updates, found.samples) == (3, 22)
    assert (found.plan is not None) == (form == "loader")
    assert found.evaluation is not None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in range(0, 22, 8):
        optimizer.zero_grad()
        gnn.loss(plain, gnn.Batch.from_data_list(data[start : start + 8])).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_weight_of_nodes_is_named(gnn: Any) -> None:
    def of_nodes(model: Any, batch: Any) -> Tensor:
        return torch.as_tensor((model.first(batch.x, batch.edge_index) ** 2).mean())

    def drawn(size: int) -> Any:
        return gnn.Batch.from_data_list(graphs_of(gnn, size))

    asked = {"split": gnn.split, "size": gnn.size}
    found = autoaccum.verify(model=gnn.Net(), batch=drawn, loss=of_nodes, **asked)
    (cause,) = found.causes
    assert cause.change.facts["code"] in {f'len(batch["{name}"])' for name in ("x", "batch")}
    weighted = {"weight": lambda batch: batch.num_nodes, **asked}
    assert autoaccum.verify(model=gnn.Net(), batch=drawn, loss=of_nodes, **weighted).equivalent
