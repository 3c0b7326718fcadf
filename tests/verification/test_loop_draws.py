"""Loops of the user's own that draw in another order, at other times, or more often than the Accumulator does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoaccum.api import verify
from autoaccum.verification.verification_result import Verification

Loop = Callable[[nn.Module, list[Any]], None]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))


def _batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.arange(size) % 3


def _verified(loop: Loop, **fields: Any) -> Verification:
    parts = {"model": _model(), "batch": _batch, "criterion": nn.CrossEntropyLoss(), **fields}
    return verify(accumulate=loop, target_batch=6, micro_batch=2, **parts)


def _run(model: Any, part: Any, total: int) -> None:
    torch.autograd.backward(F.cross_entropy(model(part[0]), part[1]) * len(part[1]) / total)


def _total(micro_batches: list[Any]) -> int:
    return sum(len(targets) for _, targets in micro_batches)


def backwards(model: nn.Module, micro_batches: list[Any]) -> None:
    for part in reversed(micro_batches):
        _run(model, part, _total(micro_batches))


def together(model: nn.Module, micro_batches: list[Any]) -> None:
    inputs, targets = (torch.cat(column) for column in zip(*micro_batches, strict=True))
    _run(model, (inputs, targets), len(targets))


def checkpointed(model: nn.Module, micro_batches: list[Any]) -> None:
    for part in micro_batches:
        _run(lambda inputs: checkpoint(model, inputs, use_reentrant=False), part, _total(micro_batches))


def with_accuracy(model: nn.Module, micro_batches: list[Any]) -> None:
    for part in micro_batches:
        with torch.no_grad():
            model(part[0]).argmax(1)
        _run(model, part, _total(micro_batches))


def collected_backwards(model: nn.Module, micro_batches: list[Any]) -> None:
    given = [(inputs.clone(), targets) for inputs, targets in micro_batches]
    for part in given[::-1]:
        _run(model, part, _total(given))


@pytest.mark.parametrize("loop", [backwards, together, checkpointed, with_accuracy, collected_backwards])
def test_a_right_loop_is_equivalent_in_whatever_order_it_draws(loop: Loop) -> None:
    found = _verified(loop)
    assert found.equivalent
    assert "replaced by neutral values, in the full batch's update and in accumulate()'s by 2 + 2 + 2" in found.notes[0]


def skipping(model: nn.Module, micro_batches: list[Any]) -> None:
    for part in micro_batches[:-1]:
        _run(model, part, _total(micro_batches))


def resting(model: nn.Module, micro_batches: list[Any]) -> None:
    model.eval()
    for part in micro_batches:
        _run(model, part, _total(micro_batches))


def undivided(model: nn.Module, micro_batches: list[Any]) -> None:
    for part in reversed(micro_batches):
        _run(model, part, len(part[1]))


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        (skipping, "some parts are left out: they count for 0.3333, 0.3333 and 0"),
        (resting, "not a combination of the gradients of loss(model, part)"),
        (undivided, "added up without dividing them"),
    ],
)
def test_a_wrong_loop_is_wrong_in_whatever_order_it_draws(loop: Loop, found: str) -> None:
    verification = _verified(loop)
    assert not verification.equivalent
    assert found in verification.causes[0].found
