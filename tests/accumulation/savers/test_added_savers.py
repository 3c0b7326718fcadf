"""Where not even one sample fits, an Accumulator adds a saver, and the update stays the full batch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_blocks import ResidualBlock
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.accumulation import savers as savers_module
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.errors import DoesNotFitError
from autoaccum.spec import OFFLOADS


class Block(ResidualBlock):
    """Runs out of memory while `most` is 0, unless it is recomputed."""

    most = 1

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not self.most and "forward" not in vars(self):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x, scale=scale)


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(8, dropout=0.2) for _ in range(4)), nn.Linear(8, 3)).to(dtype)


class Seen(StepObserver):
    def __init__(self) -> None:
        self.added: list[tuple[StepPhase, int, str]] = []

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        self.added.append((phase, micro_batch, saver))


def make(model: nn.Module, **options: Any) -> Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Accumulator(model, optimizer, nn.CrossEntropyLoss(), **{"micro_batch": 1, "add_savers": True, **options})


def batches(updates: int) -> Any:
    torch.manual_seed(5)
    return [(torch.randn(6, 8).double(), torch.randint(0, 3, (6,))) for _ in range(updates)]


def test_the_update_is_repeated_with_all_blocks_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, seen = net(), net(), Seen()
    accumulator, plain = make(model, observer=seen), make(other)
    for at, batch in enumerate(batches(4)):
        monkeypatch.setattr(Block, "most", at != 1)
        torch.manual_seed(at)
        result = accumulator.step(batch)
        assert result.retries == (at == 1)
        monkeypatch.setattr(Block, "most", 1)
        torch.manual_seed(at)
        assert plain.step(batch).loss == pytest.approx(result.loss, abs=1e-12)
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-10)
    assert seen.added == [("forward", 1, "recompute")]
    assert accumulator.savers == ("recompute",)


@pytest.mark.parametrize(("savers", "left"), [("recompute=2", ("recompute",)), ("recompute", None)])
def test_the_rest_of_the_blocks_follows(savers: str, left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "most", 0)
    model, seen = net(), Seen()
    accumulator = make(model, savers=savers, observer=seen)
    if left is None:
        monkeypatch.setattr(Block, "forward", lambda self, x: 1 / 0 if self.most else raise_out_of_memory())
        with pytest.raises(DoesNotFitError, match="not even one sample at a time fits"):
            accumulator.step(batches(1)[0])
    else:
        accumulator.step(batches(1)[0])
        assert accumulator.savers == left
    assert len(seen.added) == (left is not None)


def raise_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_it_warns_and_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "most", 0)
    with pytest.raises(DoesNotFitError, match="not even one sample at a time fits"):
        make(net(), add_savers=False).step(batches(1)[0])
    with pytest.warns(
        UserWarning, match="micro-batches of 1 sample: the update was rolled back; it and later ones run with"
    ):
        make(net()).step(batches(1)[0])


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload as if the model were on a card."""
    monkeypatch.setattr(savers_module, "model_device", lambda model: torch.device("cuda"))


class Failing(Seen):
    """Runs out of memory as these phases begin, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: list[StepPhase] = []

    def phase(self, phase: StepPhase) -> None:
        if self.fails and phase == self.fails[0]:
            self.fails.pop(0)
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.usefixtures("on_a_card")
def test_on_a_card_the_offloads_follow() -> None:
    model, other, seen = net(), net(), Failing()
    seen.fails = ["forward", "backward", "backward", "clip"]
    accumulator, batch = make(model, observer=seen), batches(1)[0]
    torch.manual_seed(1)
    assert accumulator.step(batch).retries == 4
    assert [saver for *_, saver in seen.added] == ["recompute", *OFFLOADS]
    assert accumulator.savers == ("recompute", *OFFLOADS)
    torch.manual_seed(1)
    make(other).step(batch)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("first", [0, 1])
def test_an_update_that_does_not_fit_goes_to_the_host(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the micro-batch: the first update, which is protected, and a later one."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)  # Smaller micro-batches would draw other masks.
    model, other, seen = net(), net(), Failing()
    accumulator, plain = make(model, observer=seen, micro_batch=6), make(other, micro_batch=6)
    for at, batch in enumerate(batches(3)):
        seen.fails = ["update", "update"] if at == first else []
        assert accumulator.step(batch).retries == len(seen.fails) + 2 * (at == first)
        plain.step(batch)
    assert seen.added == [("update", 3, "offload-optimizer")]
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-10)
    seen.fails = ["update", "update", "update"]
    with pytest.raises(DoesNotFitError, match="the update runs out of memory, whatever the micro-batch"):
        accumulator.step(batches(1)[0])


@pytest.mark.usefixtures("on_a_card")
def test_savers_of_an_earlier_run_are_restored_where_they_help() -> None:
    accumulator = make(net())
    accumulator.restore_savers(["offload-optimizer", "recompute"])
    assert accumulator.savers == ("recompute", "offload-optimizer")
    half = make(net(torch.bfloat16))
    half.restore_savers(["offload-optimizer", "offload-gradients"])
    assert half.savers == ("offload-gradients",), "a checkpoint would round the copies of its weights in float32"
    flat = make(nn.Linear(8, 3))
    flat.restore_savers(["recompute"])
    assert flat.savers == ()


def test_on_the_cpu_nothing_is_offloaded() -> None:
    accumulator = make(copy.deepcopy(net()))
    accumulator.restore_savers(["recompute", *OFFLOADS])
    assert accumulator.savers == ("recompute",)
