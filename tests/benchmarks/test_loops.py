"""The bytes that the loops of the tables hold besides workspaces: a small model on a simulated card."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from truths.loops import Loop, predict_loop, trace_runs, with_parameters
from truths.models import build_timm
from truths.scores import NotBuilt

from autoaccum.simulation.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.simulation.cards import find_card

CARD = find_card("rtx3090")
SIZE, INPUTS, OUTPUTS = 32, 256, 1024
BATCH, WEIGHTS, RETURNED, LOSS = 4 * SIZE * INPUTS, 4 * INPUTS * OUTPUTS, 4 * SIZE * OUTPUTS, 4
MOMENT = 64 << 20
"""Bytes held for a moment before the forward pass, far more than all else, so that the peak is what is held then."""


def make_loop(moment: int = MOMENT, **changes: Any) -> Loop:
    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        torch.empty(moment, dtype=torch.uint8, device="cuda")
        outputs = model(batch)
        return outputs.sum(), outputs

    return Loop(
        model=lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
        batch=lambda: torch.randn(SIZE, INPUTS),
        forward=forward,
        optimizer=with_parameters(torch.optim.SGD, lr=0.1),
        **changes,
    )


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
    (trace,) = trace_runs(make_loop(zero_grad=zero_grad, set_to_none=set_to_none), CARD, SIZE)
    held = most = 0
    for event in trace.events:
        size = trace.sizes[max(event, ~event)]
        if isinstance(size, int):  # Workspaces have their own tests.
            held += size if event >= 0 else -size
            most = max(most, held)
    assert most == MOMENT + WEIGHTS + BATCH + RETURNED + LOSS + gradients


@pytest.mark.parametrize(("gib", "outcome"), [(8, "ok"), (24, "oom")])
def test_a_prediction_is_of_the_card(gib: int, outcome: str) -> None:
    found = predict_loop(make_loop(gib << 30), CARD, SIZE)
    assert (found.batch, found.outcome, found.trains) == (SIZE, outcome, outcome == "ok")
    assert found.capacity_bytes == CARD.total_bytes - found.start_bytes - found.modules_bytes
    assert gib << 30 < found.min_budget_bytes
    assert (found.min_budget_bytes <= found.capacity_bytes) == found.trains
    assert found.shown_bytes <= found.capacity_bytes


def test_the_second_run_of_a_process_starts_with_what_the_first_left() -> None:
    """The workspaces of cuBLAS, which torch 2.6 keeps, are made after the moment of the first run, in its segment."""
    sizes = iter([MOMENT])

    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        torch.empty(next(sizes, 0), dtype=torch.uint8, device="cuda")
        return model(batch).sum(), batch

    alone = predict_loop(make_loop(0), CARD, SIZE, release=(2, 6))
    after = predict_loop(replace(make_loop(twice=True), forward=forward), CARD, SIZE, release=(2, 6))
    assert after.min_budget_bytes - alone.min_budget_bytes == MOMENT - LARGE_SEGMENT_BYTES


def test_models_of_another_timm_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(__version__="1.0.31"))
    with pytest.raises(NotBuilt, match=r"with timm 0\.6\.7, not 1\.0\.31"):
        build_timm("resnet50")
