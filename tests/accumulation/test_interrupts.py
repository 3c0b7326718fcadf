from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.changes import state_digest
from autoaccum.accumulation.recovery import HeldInterrupts


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


class Pressing(nn.Module):
    """Has somebody press Ctrl-C while it runs forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.when: dict[str, Callable[[], None]] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        self.when.pop("forward", lambda: None)()
        if "backward" in self.when and out.requires_grad:
            hooked: Any = out
            hooked.register_hook(lambda _: self.when.pop("backward", lambda: None)())
        return out


def make(dtype: torch.dtype = torch.float32) -> tuple[Pressing, torch.optim.Optimizer, Accumulator, Any]:
    torch.manual_seed(0)
    model = Pressing().to(dtype)
    model.norm.eval()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(6, 3, dtype=dtype), torch.randn(6, 2, dtype=dtype)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=2)
    accumulator.step(batch)
    return model, optimizer, accumulator, batch


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pressed_before_the_update_it_undoes_the_step(when: str, dtype: torch.dtype) -> None:
    model, optimizer, accumulator, batch = make(dtype)
    before = state_digest(model, optimizer)
    model.when[when] = press
    with pytest.raises(KeyboardInterrupt):
        accumulator.step(batch)
    assert accumulator.phase == when, "it waits for the end of that phase, not for the whole step"
    assert state_digest(model, optimizer) == before
    assert accumulator.step(batch).updated


def test_pressed_within_an_unguarded_update_it_leaves_the_update_made() -> None:
    model, optimizer, accumulator, batch = make()
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    handle = optimizer.register_step_pre_hook(lambda *_: press())
    with pytest.raises(KeyboardInterrupt):
        accumulator.step_parts([batch])
    handle.remove()
    Accumulator(twin, twin_optimizer, nn.MSELoss(), micro_batch=2).step(batch)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert accumulator.step(batch).updated


def test_pressed_twice_it_comes_at_once() -> None:
    model, optimizer, accumulator, batch = make()
    before, reached = state_digest(model, optimizer), []

    def press_twice() -> None:
        press(2)
        reached.append(True)

    model.when["forward"] = press_twice
    with pytest.raises(KeyboardInterrupt):
        accumulator.step(batch)
    assert not reached
    assert state_digest(model, optimizer) == before


def test_a_handler_that_does_not_raise_is_called_and_the_step_goes_on() -> None:
    model, _, accumulator, batch = make()
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    model.when["forward"] = press
    assert accumulator.step(batch).updated
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_set_within_is_kept() -> None:
    seen: list[int] = []
    with HeldInterrupts():
        signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    press()
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_train_without_it() -> None:
    results: list[bool] = []
    _, _, accumulator, batch = make()
    thread = threading.Thread(target=lambda: results.append(accumulator.step(batch).updated))
    thread.start()
    thread.join()
    assert results == [True]
