"""The bytes that the loops of the tables hold besides workspaces: small models on a simulated card."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from truths.loops import Loop, predict_loop, trace_loop

from autoaccum.simulation.cards import find_card

pytestmark = pytest.mark.usefixtures("frozen")

CARD = find_card("rtx3090")
GIB = 1 << 30
SIZE, INPUTS, HIDDEN, OUTPUTS = 32, 256, 512, 1024
BATCH, FIRST, SECOND = 4 * SIZE * INPUTS, 4 * SIZE * HIDDEN, 4 * SIZE * OUTPUTS
"""Bytes of the batch and of what each layer returns,"""
WEIGHTS = 4 * (INPUTS * HIDDEN + HIDDEN * OUTPUTS)
LOSS = 4
MOMENT = 64 << 20
"""of what is held for a moment of the step, far more than all else, so that the peak is what is held beside it then."""


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Garbage is looked for between updates; not in what was imported, which is most of the time taken else."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False))


def samples() -> Tensor:
    return torch.randn(SIZE, INPUTS)


def hold_a_moment(*_: Any) -> None:
    torch.empty(MOMENT, dtype=torch.uint8, device="cuda")


def at_first(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The moment is before the first layer."""
    hold_a_moment()
    outputs = model(batch)
    return outputs.sum(), outputs


def make_loop(**changes: Any) -> Loop:
    chosen: dict[str, Any] = {"model": layers, "batch": samples, "forward": at_first, "optimizer": plain}
    return Loop(**{**chosen, **changes})


def plain(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def peak_bytes(loop: Loop) -> int:
    """Return the bytes of tensors; workspaces have their own tests."""
    trace = trace_loop(loop, CARD, SIZE)
    held = most = 0
    for event in trace.events:
        size = trace.sizes[event if event >= 0 else ~event]
        if isinstance(size, int):
            held += size if event >= 0 else -size
            most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("zero_grad", "set_to_none", "gradients"),
    [
        ("start", True, 0),
        ("before backward", True, WEIGHTS),
        ("after step", True, 0),
        ("start", False, WEIGHTS),
        ("before backward", False, WEIGHTS),
        ("after step", False, WEIGHTS),
    ],
)
def test_gradients_are_there_in_the_forward_pass_until_they_are_cleared(
    zero_grad: Any, set_to_none: bool, gradients: int
) -> None:
    loop = make_loop(zero_grad=zero_grad, set_to_none=set_to_none)
    assert peak_bytes(loop) == MOMENT + WEIGHTS + BATCH + SECOND + LOSS + gradients


@pytest.mark.parametrize(("gib", "outcome"), [(8, "ok"), (24, "oom")])
def test_a_prediction_is_of_the_card(gib: int, outcome: str) -> None:
    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")
        return at_first(model, batch)

    found = predict_loop(make_loop(forward=forward), CARD, SIZE)
    assert (found.batch, found.outcome, found.trains) == (SIZE, outcome, outcome == "ok")
    assert found.capacity_bytes == CARD.total_bytes - found.start_bytes - found.modules_bytes
    assert (found.least_bytes <= found.capacity_bytes) == found.trains
    assert found.shown_bytes <= found.capacity_bytes
    assert gib * GIB < found.least_bytes
