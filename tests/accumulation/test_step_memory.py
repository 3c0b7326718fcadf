"""What a step holds, and when it lets go of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_training import CRITERION, batch_of, net, sgd
from torch import nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.changes import state_digest
from autoaccum.accumulation.update import TemporariesRecorder


def test_each_graph_is_freed_by_its_own_backward() -> None:
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())])
    optimizer = sgd(model)
    x = torch.randn(256, 16)

    def peak(micro_batch: int) -> int:
        accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=micro_batch)
        accumulator.step((x, x))
        with TemporariesRecorder() as recorder:
            accumulator.step((x, x))
        return sum(size for _, size in recorder.largest_set())

    assert peak(16) < 0.25 * peak(256)


def test_the_guard_s_copies_are_freed_with_the_first_update() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=2)
    x = torch.randn(4, 256)
    with TemporariesRecorder() as recorder:
        accumulator.step((x, x))
        kept = sum(recorder._blocks[index][1] for index in {i for i, _ in recorder._events} if alive(recorder, index))
    state = sum(t.nbytes for values in optimizer.state.values() for t in values.values())
    assert kept <= state


def alive(recorder: TemporariesRecorder, index: int) -> bool:
    return (index, False) not in recorder._events


def test_the_guard_returns_when_a_parameter_joins() -> None:
    model = net()
    model.first.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=4)
    accumulator.step(batch_of(8))
    model.first.weight.requires_grad_(True)

    def fail(*_: Any) -> None:
        raise ValueError("not now")

    before = state_digest(model, optimizer)
    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="not now"):
        accumulator.step(batch_of(8))
    handle.remove()
    torch.manual_seed(0)
    assert len(optimizer.state) == 3
    assert accumulator.step(batch_of(8)).updated
    assert before != state_digest(model, optimizer)
