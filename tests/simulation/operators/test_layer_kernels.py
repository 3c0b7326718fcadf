"""Convolutions, dropout, norms and CTC losses as CUDA runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_up_card import make_card, on_card, sizes_of
from torch import Tensor
from torch.nn import functional as F

from autoaccum.simulation.operators.layers import is_cudnn_batch_norm
from autoaccum.simulation.tracing.simulation import simulate

CARD = make_card()
LAST = torch.channels_last


@pytest.mark.parametrize(("tensor_last", "weight_last"), [(True, True), (True, False), (False, True), (False, False)])
def test_one_channels_last_operand_decides_the_format_of_a_convolution(tensor_last: bool, weight_last: bool) -> None:
    with simulate(CARD):
        tensor, weight = torch.empty(2, 8, 6, 6, device="cuda:0"), torch.empty(4, 8, 3, 3, device="cuda:0")
        tensor = tensor.to(memory_format=LAST) if tensor_last else tensor
        weight = weight.to(memory_format=LAST) if weight_last else weight
        operands = tensor.requires_grad_(), weight.requires_grad_()
        out = F.conv2d(*operands)
        gradients = torch.autograd.grad(out, operands, torch.empty_like(out))
    assert {each.is_contiguous(memory_format=LAST) for each in (out, *gradients)} == {tensor_last or weight_last}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "bfloat16"}, False),
        ({"weight": None, "bias": None}, False),
        ({"shape": (4, 32)}, False),
        ({"tracks": False, "training": False}, False),
        ({"shape": (70_000, 2, 1, 1), "training": False}, False),
        ({"shape": (70_000, 2, 1, 1)}, True),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else "",
)
def test_batch_norm_runs_with_cudnn(changes: dict[str, Any], expected: bool) -> None:
    def meta(dtype: str | None, *shape: int) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    given: dict[str, Any] = {"dtype": "float32", "weight": "float32", "shape": (4, 32, 8, 8), "tracks": True, **changes}
    weight, bias = meta(given["weight"], 32), meta(given.get("bias", "float32"), 32)
    statistics = (meta("float32", 32),) * 2 if given["tracks"] else (None, None)
    data, options = meta(given["dtype"], *given["shape"]), (given.get("training", True), given.get("eps", 1e-5))
    assert data is not None
    assert is_cudnn_batch_norm(data, weight, bias, statistics, *options) is expected


STEPS, CTC_BATCH, CLASSES, LONGEST = 50, 4, 20, 10


def log_probs() -> Tensor:
    return torch.empty(STEPS, CTC_BATCH, CLASSES, device="cuda:0", requires_grad=True)


def test_ctc_loss_keeps_a_table_of_paths() -> None:
    with on_card() as recorder:
        x, lengths = log_probs(), torch.tensor([3, LONGEST, 7, 1])
        held: list[Tensor] = []
        targets = torch.ones(CTC_BATCH, LONGEST + 2, dtype=torch.long)

        def run() -> None:
            held.append(F.ctc_loss(x, targets, torch.full((CTC_BATCH,), STEPS), lengths, reduction="sum"))

        table = CTC_BATCH * STEPS * (2 * LONGEST + 1) * 4
        assert sizes_of(recorder, run, above=4) == [CTC_BATCH * (LONGEST + 2) * 8, table, CTC_BATCH * 4]
        sizes = sizes_of(recorder, lambda: torch.autograd.backward(held[0]), above=4)
        assert sizes == [table, STEPS * CTC_BATCH * CLASSES * 4]
