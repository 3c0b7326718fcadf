"""Ctrl-C: it ends a trial at once, waits while live objects are restored, and the search goes on."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.devices.delayed_signals import DelayedSignals
from autoaccum.devices.in_place.saved_state import SavedState


def test_a_signal_waits_for_a_window_and_closes_it() -> None:
    reached = []

    def be_interrupted_twice() -> None:
        with DelayedSignals() as interruptions:
            signal.raise_signal(signal.SIGINT)
            reached.append("held")
            assert not interruptions.delivered
            with pytest.raises(KeyboardInterrupt), interruptions.window():
                reached.append("never")
            assert interruptions.delivered
            signal.raise_signal(signal.SIGINT)
            reached.append("held again")

    with pytest.raises(KeyboardInterrupt):
        be_interrupted_twice()
    assert reached == ["held", "held again"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_delivered_at_once_within_a_window() -> None:
    with DelayedSignals() as interruptions:
        with pytest.raises(KeyboardInterrupt), interruptions.window():
            signal.raise_signal(signal.SIGINT)
        assert interruptions.ended(ValueError())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_only_noted_leaves_out_of_memory_an_outcome(live_device: Any, pairs: Any) -> None:
    """As of a scheduler that announces the end of a job (SIGUSR1), whose handler sets a flag."""
    noted: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 4:
            signal.raise_signal(signal.SIGUSR1)
            raise MemoryError
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    before = signal.signal(signal.SIGUSR1, lambda *_: noted.append(1))
    try:
        device = live_device(nn.Linear(6, 3), pairs, loss)
        assert device.trial((4,)).outcome == "oom"
        assert device.trial((2,)).outcome == "ok"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert noted == [1]


@pytest.mark.parametrize("where", ["forward", "backward", "update", "batch"])
@pytest.mark.parametrize("real", [False, True])
def test_ctrl_c_restores_everything_and_goes_on(where: str, real: bool, live_device: Any, pairs: Any) -> None:
    def strike(now: str) -> None:
        if now == where and real:
            signal.raise_signal(signal.SIGINT)
        elif now == where:
            raise KeyboardInterrupt

    class Updating(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["params"][0].data.add_(1.0)
            strike("update")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        strike("forward")
        value.register_hook(lambda grad: strike("backward"))  # type: ignore[no-untyped-call]
        return value

    def batch(size: int) -> Any:
        strike("batch")
        return pairs(size)

    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = Updating(model.parameters(), lr=0.1)
    device = live_device(model, batch, loss, optimizer=optimizer)
    before = state_digest(model, optimizer)
    for ask in (lambda: device.trial((2, 2)), device.inspect):
        with pytest.raises(KeyboardInterrupt):
            ask()
        assert state_digest(model, optimizer) == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert torch.is_grad_enabled()


def test_ctrl_c_while_everything_is_restored_waits(
    live_device: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    device = live_device(model, pairs, optimizer=optimizer)
    assert device.limit_bytes
    before, restore, struck = state_digest(model, optimizer), SavedState.restore, []

    def strike(self: SavedState) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        restore(self)
        struck.append(1)

    monkeypatch.setattr(SavedState, "restore", strike)
    with pytest.raises(KeyboardInterrupt):
        device.trial((2, 2))
    assert struck
    assert state_digest(model, optimizer) == before
