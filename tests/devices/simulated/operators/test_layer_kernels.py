"""Convolutions, dropout, norms and CTC losses as CUDA runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from made_up_card import make_card, on_card, sizes_of
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.operators.normalization import is_cudnn_batch_norm
from autoaccum.devices.simulated.tracing.recorder import Recorder
from autoaccum.devices.simulated.tracing.simulation import simulate

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


ELEMENTS = 1 << 12


@contextmanager
def recording() -> Iterator[tuple[Recorder, Tensor]]:
    with simulate(CARD) as mode:
        x = torch.empty(ELEMENTS, dtype=torch.bfloat16, device="cuda:0", requires_grad=True)
        mode.recorder.begin(lambda: "forward")
        yield mode.recorder, x


def test_dropout_keeps_one_byte_per_element() -> None:
    with recording() as (recorder, x):
        y = F.dropout(x, 0.1)
        assert recorder.sizes[1:] == [ELEMENTS, 2 * ELEMENTS], "the mask comes first"
        gradient = torch.empty_like(y)
        del recorder.sizes[:]
        torch.autograd.backward(y, gradient)
        assert recorder.sizes == [2 * ELEMENTS]


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_without_effect_takes_no_memory(p: float, train: bool) -> None:
    with recording() as (recorder, x):
        assert F.dropout(x, p, train) is not None
        assert recorder.sizes[1:] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float16", "weight": "float16"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"weight": None, "bias": None}, False),
        ({"shape": (4, 32)}, False),
        ({"shape": (4, 32, 8)}, True),
        ({"tracks": False}, True),
        ({"tracks": False, "training": False}, False),
        ({"training": False}, True),
        ({"shape": (70_000, 2, 1, 1), "training": False}, False),
        ({"shape": (70_000, 2, 1, 1)}, True),
        ({"shape": (1 << 10, 1 << 11, 1 << 10)}, False),
        ({"eps": -1.0}, False),
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


def test_batch_norm_runs_without_cudnn_where_it_is_switched_off() -> None:
    with simulate(CARD), torch.backends.cudnn.flags(enabled=False):
        data = torch.empty(4, 32, 8, 8, device="cuda:0")
        *_, backend = torch.ops.aten._batch_norm_impl_index(data, *[data.new_ones(32)] * 4, True, 0.1, 1e-5, True)
    assert backend == 0


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


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss_takes_any_reduction_and_unbatched_inputs(reduction: str) -> None:
    with on_card():
        x = torch.empty(STEPS, CLASSES, device="cuda:0", requires_grad=True)
        lengths = torch.tensor(STEPS), torch.tensor(3)
        loss = F.ctc_loss(x, torch.ones(3, dtype=torch.long), *lengths, reduction=reduction, zero_infinity=True)
        assert loss.shape == ()
        torch.autograd.backward(loss)
        assert x.grad is not None
        assert x.grad.shape == x.shape
