"""Real out-of-memory errors, from the device's own allocator: everything is as before, then repeated smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.devices.meters import card_limit
from autoaccum.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch")

MOST = 4
MORE_THAN_ANY_BYTES = 2**50
Phase = Literal["forward", "backward"]


def ask_for_too_much(device: torch.device) -> None:
    torch.empty(MORE_THAN_ANY_BYTES, dtype=torch.uint8, device=device)


class GreedyBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        if len(gradient) > MOST:
            ask_for_too_much(gradient.device)
        return gradient


class Greedy(nn.Module):
    """Wants more than there is in `phase` for more than `MOST` samples; draws dropout and counts in a buffer."""

    def __init__(self, phase: Phase | None) -> None:
        super().__init__()
        self.phase = phase
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3))

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.layers(inputs)
        if self.phase == "forward" and len(inputs) > MOST:
            ask_for_too_much(inputs.device)
        apply: Any = GreedyBackward.apply
        return apply(hidden) if self.phase == "backward" else hidden


class GreedyOptimizer(torch.optim.AdamW):
    """Wants more than there is, once it has updated the first parameter."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1.0)
        ask_for_too_much(first.device)


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 6), torch.randint(0, 3, (16,))


@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
@pytest.mark.parametrize("trained", [False, True])
def test_out_of_memory_leaves_everything_as_it_was(phase: Any, trained: bool, place: torch.device) -> None:
    torch.manual_seed(0)
    model = Greedy(None).to(place)
    kind = GreedyOptimizer if phase == "update" else torch.optim.AdamW
    optimizer = kind(model.parameters())
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=8, recover=False)
    if trained and phase != "update":
        accumulator.step(make_batch())
    model.phase = phase if phase != "update" else None
    batch = make_batch()
    before = state_digest(model, optimizer)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as seen:
        accumulator.step(batch)
    oom = find_out_of_memory(seen.value)
    assert oom is not None
    assert oom.certain
    assert accumulator.phase == phase
    assert state_digest(model, optimizer) == before


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore::autoaccum.accumulation.step_result.AccumulationWarning")
def test_the_batch_is_repeated_in_parts_that_fit(phase: Phase, place: torch.device) -> None:
    updated = []
    for greedy in (phase, None):
        torch.manual_seed(0)
        model = Greedy(greedy).double().to(place)
        model.layers[1].eval()
        model.layers[2].eval()
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=1.0), nn.CrossEntropyLoss(), micro_batch=8 if greedy else 16
        )
        inputs, targets = make_batch()
        result = accumulator.step((inputs.double(), targets))
        assert result.updated
        assert (result.retries > 0) == (greedy is not None)
        if greedy:
            assert max(result.micro_batches) <= MOST
            assert accumulator.micro_batch <= MOST
        updated.append([parameter.detach().clone() for parameter in model.parameters()])
    for smaller, whole in zip(*updated, strict=True):
        assert torch.allclose(smaller, whole, rtol=0, atol=1e-12)


def test_the_retry_is_reported(place: torch.device) -> None:
    model = nn.Sequential(nn.Flatten(), Greedy("forward")).to(place)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), micro_batch=16)
    with pytest.warns(AccumulationWarning, match="out of memory") as told:
        accumulator.step(make_batch())
    assert str(told[0].message).startswith("out of memory (forward) with micro-batches of 16: nothing was changed")


@contextmanager
def lowered(place: torch.device, spare_bytes: int) -> Iterator[None]:
    """Leave the card's allocator `spare_bytes` more than it holds."""
    torch.cuda.empty_cache()
    with card_limit(place.index, torch.cuda.memory_reserved(place.index) + spare_bytes):
        yield


@pytest.mark.gpu
def test_activations_beyond_a_real_limit_are_repeated_smaller() -> None:
    place = torch.device("cuda", 0)
    width = 4096
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8192)
    batch = torch.randn(8192, width), torch.randn(8192, width)
    accumulator.micro_batch = 256
    assert accumulator.step(batch).retries == 0
    accumulator.micro_batch = 8192
    # Eight activations of 128 MiB at 8192 samples; gradients and temporaries of AdamW take 256 MiB each.
    with lowered(place, 800 * MIB), pytest.warns(AccumulationWarning, match="out of memory"):
        result = accumulator.step(batch)
    assert result.updated
    assert result.retries > 0
    assert sum(result.micro_batches) == 8192


@pytest.mark.gpu
def test_an_update_that_cannot_be_provided_for_is_not_begun() -> None:
    place = torch.device("cuda", 0)
    model = nn.Linear(4096, 8192, bias=False).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8, recover=False)
    batch = torch.randn(8, 4096), torch.randn(8, 8192)
    for _ in range(2):
        accumulator.step(batch)
    before = state_digest(model, optimizer)
    # The gradient takes 128 MiB, the temporaries of the update 128 MiB more: there is room for one of them.
    with lowered(place, 200 * MIB), pytest.raises(torch.OutOfMemoryError):
        accumulator.step(batch)
    assert accumulator.phase == "update"
    assert state_digest(model, optimizer) == before
    assert accumulator.step(batch).updated
