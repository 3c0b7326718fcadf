"""The emitted file recomputes the plan's blocks: the gradient is the Accumulator's, and backward needs as little."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from imported_files import import_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.workload.spec import Workload


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        added: Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return x + scale * added


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(5)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net().double()


def make(**changes: Any) -> Workload:
    options = {"model": net, "batch": lambda n: (torch.randn(n, 8).double(), torch.randint(0, 3, (n,)))}
    return Workload(**{**options, "criterion": nn.CrossEntropyLoss(), **changes})


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Add up what autograd saves for backward, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}
    found: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield found
    found.append(sum(storage.nbytes() for storage in storages.values()))


@pytest.mark.parametrize("savers", [(), ("recompute=2",), ("recompute",)])
def test_gradients_are_the_accumulator_s(savers: Any, emit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make(savers=savers)
    file, calls = Path(emit(work, target=7, ceiling=3).__file__), list[int]()
    model, batch = work.build_model(), work.build_batch(7)
    other = copy.deepcopy(model)
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.up.register_forward_hook(lambda *_, number=number: calls.append(number))
    torch.manual_seed(2)
    with monkeypatch.context() as without, saved_bytes() as saved:
        without.setitem(sys.modules, "autoaccum", None)  # An import of it would fail.
        module = import_file(file)
        loss = module.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), work.criterion, batch)
    accumulator = Accumulator(
        other, torch.optim.SGD(other.parameters(), lr=0.1), work.criterion, micro_batch=3, savers=savers
    )
    torch.manual_seed(2)
    with saved_bytes() as proved:
        assert accumulator.step(batch).loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-10)
    again = {(): [], ("recompute=2",): [2, 0], ("recompute",): [4, 3, 2, 1, 0]}[savers]
    assert calls == 3 * [0, 1, 2, 3, 4, *again]
    assert saved == pytest.approx(proved, rel=0.1)
    calls.clear()
    model(batch[0]).sum().backward()
    assert calls == [0, 1, 2, 3, 4], "only within a step"


def test_backward_needs_less_with_each_block(emit: Any) -> None:
    needed = []
    for savers in ((), ("recompute=2",), ("recompute",)):
        work = make(savers=savers)
        module, model, batch = emit(work, target=8, ceiling=8), work.build_model(), work.build_batch(8)
        with saved_bytes() as saved:
            module.train_step(model, torch.optim.SGD(model.parameters()), work.criterion, batch)
        weights = sum(one.nbytes for one in model.parameters())
        needed.append(saved[0] - weights)
    hidden = 8 * 32 * 8  # Of a block: the output of `tanh`, dropout's mask and its output.
    assert needed[0] - needed[1] >= 2 * 2 * hidden
    assert needed[1] - needed[2] >= 3 * 2 * hidden
