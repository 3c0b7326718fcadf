"""The memory of a step: graphs are freed early, and the memory of later updates is allocated in advance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import CRITERION, Classifier, labelled_rows, sgd
from memory_errors import OutOfMemoryAt
from state_digests import state_digest
from torch import nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.update import StorageRecorder


def test_each_graph_is_freed_by_its_own_backward() -> None:
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())])
    optimizer = sgd(model)
    x = torch.randn(256, 16)

    def peak(micro_batch: int) -> int:
        accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=micro_batch)
        accumulator.step((x, x))
        with StorageRecorder() as recorder:
            accumulator.step((x, x))
        return sum(size for _, size in recorder.peak_blocks())

    assert peak(16) < 0.25 * peak(256)


@pytest.mark.parametrize("joins", [True, False], ids=["a parameter joins", "state is dropped"])
def test_an_update_is_protected_again_when(joins: bool) -> None:
    model = Classifier().double()
    model.first.weight.requires_grad_(not joins)
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=4)
    accumulator.step(labelled_rows(8))
    model.first.weight.requires_grad_(True)
    if not joins:
        optimizer.state.clear()

    def fail(*_: Any) -> None:
        raise ValueError("not now")

    before = state_digest(model, optimizer)
    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="not now"):
        accumulator.step(labelled_rows(8))
    handle.remove()
    torch.manual_seed(0)
    assert len(optimizer.state) == (3 if joins else 0)
    assert accumulator.step(labelled_rows(8)).updated
    assert before != state_digest(model, optimizer)


def test_the_memory_of_a_later_update_is_taken_before_anything_changes() -> None:
    model = Classifier().double()
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), CRITERION, micro_batch=4)
    batch, seen = labelled_rows(8), set[str]()
    accumulator.step(batch)

    def in_update() -> bool:  # Of the second step: until that begins, the phase is the first one's.
        seen.add(str(accumulator.phase))
        return "backward" in seen and accumulator.phase == "update"

    with OutOfMemoryAt(0, in_update) as injected, pytest.warns(UserWarning, match=r"out of memory \(update\)"):
        result = accumulator.step(batch)
    assert injected.fired
    assert (result.updated, result.retries) == (True, 1)


CPU = torch.device("cpu")
COUNT = 1024


def test_the_peak_of_temporary_storages_is_recorded() -> None:
    x = torch.ones(COUNT)
    with StorageRecorder() as recorder:
        first = x + 1
        second = first * 2
        del first
        third = second.double()
        view = third[:4]
        view.add_(1)
        del second, third, view
        product = x * 3
    assert recorder.peak_blocks() == [(CPU, 4 * COUNT), (CPU, 8 * COUNT)]
    assert product.shape == x.shape
