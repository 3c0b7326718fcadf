"""What the CTC loss keeps on a card (`aten/src/ATen/native/cuda/LossCTC.cu`, `cudnn/LossCTC.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.simulation import simulate

CARD = Card(name="c", title="C", total_bytes=1 << 30, capability=(8, 6), multiprocessors=82, source="made up")
STEPS, BATCH, CLASSES, LONGEST = 50, 4, 20, 10


@contextmanager
def on_card() -> Iterator[Recorder]:
    with simulate(CARD) as mode:
        yield mode.recorder


def sizes_of(recorder: Recorder, run: Callable[[], Any]) -> list[Any]:
    start = len(recorder.sizes)
    kept = run()
    del kept
    return [size for size in recorder.sizes[start:] if isinstance(size, int) and size != 4]


def log_probs() -> Tensor:
    return torch.empty(STEPS, BATCH, CLASSES, device="cuda:0", requires_grad=True)


def test_keeps_a_table_of_paths() -> None:
    with on_card() as recorder:
        x, lengths = log_probs(), torch.tensor([3, LONGEST, 7, 1])
        held: list[Tensor] = []
        targets = torch.ones(BATCH, LONGEST + 2, dtype=torch.long)

        def run() -> None:
            held.append(F.ctc_loss(x, targets, torch.full((BATCH,), STEPS), lengths, reduction="sum"))

        table = BATCH * STEPS * (2 * LONGEST + 1) * 4
        assert sizes_of(recorder, run) == [BATCH * (LONGEST + 2) * 8, table, BATCH * 4]
        sizes = sizes_of(recorder, lambda: torch.autograd.backward(held[0]))
        assert sizes == [table, STEPS * BATCH * CLASSES * 4]


def test_cudnn_takes_short_targets_in_a_row() -> None:
    with on_card() as recorder:
        x, lengths = log_probs(), torch.tensor([3, LONGEST, 7, 1], dtype=torch.int32)
        held: list[Tensor] = []
        targets = torch.ones(21, dtype=torch.int32)
        inputs = torch.full((BATCH,), STEPS, dtype=torch.int32)
        whole = STEPS * BATCH * CLASSES * 4
        run = lambda: held.append(F.ctc_loss(x, targets, inputs, lengths, reduction="sum"))  # noqa: E731
        assert sizes_of(recorder, run) == [BATCH * 4, whole]
        assert sizes_of(recorder, lambda: torch.autograd.backward(held[0])) == [whole]


def test_lengths_on_the_card_count_as_the_widest() -> None:
    with on_card() as recorder:
        targets = torch.empty(BATCH, LONGEST, dtype=torch.long, device="cuda:0")
        lengths = [torch.empty(BATCH, dtype=torch.long, device="cuda:0") for _ in range(2)]
        sizes = sizes_of(recorder, lambda: F.ctc_loss(log_probs(), targets, lengths[0], lengths[1]))
        assert BATCH * STEPS * (2 * LONGEST + 1) * 4 in sizes


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions_and_unbatched_inputs(reduction: str) -> None:
    with on_card():
        x = torch.empty(STEPS, CLASSES, device="cuda:0", requires_grad=True)
        lengths = torch.tensor(STEPS), torch.tensor(3)
        loss = F.ctc_loss(x, torch.ones(3, dtype=torch.long), *lengths, reduction=reduction, zero_infinity=True)
        assert loss.shape == ()
        torch.autograd.backward(loss)
        assert x.grad is not None
        assert x.grad.shape == x.shape
