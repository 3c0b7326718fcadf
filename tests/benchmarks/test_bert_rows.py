"""The bert-large table: what its settings mean, and the stand-ins for what PyTorch and bitsandbytes did in 2022."""

from __future__ import annotations

import pytest
import torch
from truths import bert_large_v100
from truths.cases import Predicted
from truths.eight_bits import Adam8bit
from truths.trainer import softmax

GIB = 1 << 30
ROW = {
    "setting": "fp16 + grad-accum 4 + grad ckpt",
    "batch": "1",
    "seq_len": "512",
    "dtype": "fp16-amp",
    "optimizer": "Trainer default (AdamW)",
    "process_gib": "8",
}


def test_the_whole_process_is_judged() -> None:
    (case,) = bert_large_v100.read([ROW])
    run = Predicted(
        batch=1,
        outcome="ok",
        capacity_bytes=15 * GIB,
        peak_bytes=12 * GIB,
        shown_bytes=7 * GIB,
        allocated_bytes=6 * GIB,
        least_bytes=6 * GIB,
        band_bytes=0,
        start_bytes=GIB,
        modules_bytes=GIB,
    )
    verdict = bert_large_v100.judge(case, [run])
    assert verdict.peak_error == pytest.approx(1 / 8)
    assert verdict.right


def test_a_softmax_keeps_its_input_and_has_the_same_gradient() -> None:
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    made = softmax(scores, dim=-1)
    assert len(made.grad_fn.saved_tensors) == 2  # type: ignore[union-attr]
    assert torch.autograd.gradcheck(lambda values: softmax(values, -1), (scores,))


def test_states_of_eight_bits_take_a_byte_for_each_element() -> None:
    large, small = (torch.nn.Parameter(torch.zeros(size)) for size in (4097, 4095))
    optimizer = Adam8bit([large, small], lr=0.1)
    for param in (large, small):
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = [sum(kept.nbytes for kept in optimizer.state[param].values()) for param in (large, small)]
    assert held == [2 * 4097 + 2 * 3 * 4, 2 * 4 * 4095]
