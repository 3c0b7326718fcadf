"""Real out-of-memory errors, from the device's own allocator: everything is as before, then repeated smaller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from factories import Classifier, class_loss, labelled_rows
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.devices.meters import card_limit
from autoaccum.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch")

SAMPLES, MOST = 16, 4
MORE_THAN_ANY_BYTES = 2**50


def ask_for_too_much(device: torch.device) -> None:
    torch.empty(MORE_THAN_ANY_BYTES, dtype=torch.uint8, device=device)


class Greedy(Classifier):
    """Wants more than there is in `phase` for more than `MOST` samples."""

    phase: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        if len(x) > MOST and self.phase == "forward":
            ask_for_too_much(x.device)
        if len(x) > MOST and self.phase == "backward":
            outputs.register_hook(lambda gradient: ask_for_too_much(gradient.device))  # type: ignore[no-untyped-call]
        return outputs


class GreedyOptimizer(torch.optim.AdamW):
    """Wants more than there is, once it has updated the first parameter."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1.0)
        ask_for_too_much(first.device)


@pytest.mark.parametrize(
    ("phase", "trained"), [("forward", False), ("forward", True), ("backward", True), ("update", False)]
)
def test_out_of_memory_leaves_everything_as_it_was(phase: str, trained: bool, place: torch.device) -> None:
    torch.manual_seed(0)
    model = Greedy(norm=True, dropout=0.5).to(place)
    optimizer = (GreedyOptimizer if phase == "update" else torch.optim.AdamW)(model.parameters())
    accumulator = Accumulator(model, optimizer, class_loss, micro_batch=8, recover=False)
    batch = labelled_rows(SAMPLES, torch.float32)
    if trained:
        accumulator.step(batch)
    model.phase = phase
    before = state_digest(model, optimizer)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as seen:
        accumulator.step(batch)
    oom = find_out_of_memory(seen.value)
    assert oom is not None
    assert oom.is_definite_oom
    assert accumulator.phase == phase
    assert state_digest(model, optimizer) == before


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_batch_is_repeated_in_parts_that_fit(phase: str, place: torch.device) -> None:
    updated, batch = [], labelled_rows(SAMPLES)
    for greedy in (None, phase):
        torch.manual_seed(0)
        model = Greedy().double().to(place)
        model.phase = greedy
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), class_loss, micro_batch=SAMPLES)
        if greedy is None:
            assert accumulator.step(batch).retries == 0
        else:
            with pytest.warns(AccumulationWarning) as told:
                result = accumulator.step(batch)
            warning = told[0].message
            assert isinstance(warning, AccumulationWarning)
            assert warning.message.code == "repeated_smaller"
            assert (warning.message.facts["phase"], warning.message.facts["size"]) == (phase, SAMPLES)
            assert result.retries > 0
            assert max(*result.micro_batches, accumulator.limit.number) <= MOST
        updated.append([parameter.detach().clone() for parameter in model.parameters()])
    for whole, smaller in zip(*updated, strict=True):
        torch.testing.assert_close(smaller, whole, rtol=0, atol=1e-12)


@contextmanager
def lowered(spare_bytes: int) -> Iterator[None]:
    """Leave the card's allocator `spare_bytes` more than it holds."""
    torch.cuda.empty_cache()
    with card_limit(0, torch.cuda.memory_reserved(0) + spare_bytes):
        yield


@pytest.mark.gpu
def test_activations_beyond_a_real_limit_are_repeated_smaller() -> None:
    width = 4096
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))).to("cuda:0")
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), micro_batch=256)
    batch = torch.randn(8192, width), torch.randn(8192, width)
    assert accumulator.step(batch).retries == 0
    accumulator.micro_batch = 8192
    # Eight activations of 128 MiB at 8192 samples; gradients and temporaries of AdamW take 256 MiB each.
    with lowered(800 * MIB), pytest.warns(AccumulationWarning, match="out of memory"):
        result = accumulator.step(batch)
    assert result.updated
    assert result.retries > 0
    assert sum(result.micro_batches) == 8192


@pytest.mark.gpu
def test_an_update_that_cannot_be_provided_for_is_not_begun() -> None:
    model = nn.Linear(4096, 8192, bias=False).to("cuda:0")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8, recover=False)
    batch = torch.randn(8, 4096), torch.randn(8, 8192)
    for _ in range(2):
        accumulator.step(batch)
    before = state_digest(model, optimizer)
    # The gradient takes 128 MiB, the temporaries of the update 128 MiB more: there is room for one of them.
    with lowered(200 * MIB), pytest.raises(torch.OutOfMemoryError):
        accumulator.step(batch)
    assert accumulator.phase == "update"
    assert state_digest(model, optimizer) == before
    assert accumulator.step(batch).updated
