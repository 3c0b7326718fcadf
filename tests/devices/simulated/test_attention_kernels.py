"""What attention takes and saves on a card: sizes by hand from `attention.cu` and `attention.cpp` of ATen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.patches import torch_release
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.simulation import simulate

BATCH, HEADS, LENGTH, SIZE = 2, 4, 128, 64


def card(capability: tuple[int, int]) -> Card:
    return Card(
        name="c",
        title="C",
        total_bytes=24 << 30,
        capability=capability,
        multiprocessors=82,
        source="made up for a test",
    )


@contextmanager
def on(capability: tuple[int, int] = (8, 6)) -> Iterator[Recorder]:
    with simulate(card(capability)) as mode:
        yield mode.recorder


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = True) -> Tensor:
    return torch.empty(shape or (BATCH, HEADS, LENGTH, SIZE), dtype=dtype, device="cuda:0", requires_grad=requires_grad)


def sizes_of(recorder: Recorder, run: Any) -> list[int]:
    """The bytes of what `run` allocates, those of at most 16 bytes (seeds, scalars) left out."""
    start = len(recorder.sizes)
    kept = run()
    del kept
    return [size for size in recorder.sizes[start:] if isinstance(size, int) and size > 16]


def test_flash_saves_its_output_and_a_logsumexp() -> None:
    with on() as recorder:
        q, k, v = tensor(), tensor(), tensor()
        half = BATCH * HEADS * LENGTH * SIZE * 2
        out: list[Tensor] = []
        assert sizes_of(recorder, lambda: out.append(F.scaled_dot_product_attention(q, k, v))) == [
            half,
            BATCH * HEADS * LENGTH * 4,
        ]
        grad = torch.empty_like(out[0])
        assert sizes_of(recorder, lambda: torch.autograd.backward(out[0], grad)) == [half] * 3


def test_flash_keeps_padded_copies_of_odd_heads() -> None:
    with on() as recorder:
        q, k, v = (tensor(BATCH, HEADS, LENGTH, 20) for _ in range(3))
        padded = BATCH * HEADS * LENGTH * 24 * 2
        held: list[Tensor] = []
        sizes = sizes_of(recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        assert sizes == [padded] * 4 + [BATCH * HEADS * LENGTH * 4]
        assert held[0].shape == (BATCH, HEADS, LENGTH, 20)
        torch.autograd.backward(held[0], torch.empty(BATCH, HEADS, LENGTH, 20, dtype=torch.bfloat16, device="cuda:0"))
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_efficient_pads_a_crooked_mask() -> None:
    with on() as recorder:
        q, k, v = (tensor(BATCH, HEADS, 100, SIZE, dtype=torch.float32) for _ in range(3))
        mask = torch.empty(100, 100, dtype=torch.bool, device="cuda:0")
        held: list[Tensor] = []
        sizes = sizes_of(recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        inverted, additive, padded = 100 * 100, 100 * 100 * 4, 100 * 104 * 4
        assert sizes == [inverted, additive, padded, BATCH * 100 * HEADS * SIZE * 4, BATCH * HEADS * 128 * 4]
        gradient = torch.empty_like(held[0])
        # Gradients lie as (batch, length, heads, size); a leaf's own is copied to the leaf's layout.
        assert (
            sizes_of(recorder, lambda: torch.autograd.backward(held[0], gradient))
            == [BATCH * HEADS * 100 * SIZE * 4] * 6
        )


def test_efficient_differentiates_a_learned_mask() -> None:
    with on():
        q, k, v = (tensor(dtype=torch.float32) for _ in range(3))
        mask = tensor(1, HEADS, LENGTH, LENGTH, dtype=torch.float32)
        torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum())
        assert mask.grad is not None
        assert mask.grad.shape == mask.shape


def test_cudnn_on_hopper() -> None:
    with on((9, 0)) as recorder:
        q, k, v = tensor(), tensor(), tensor()
        half = BATCH * HEADS * LENGTH * SIZE * 2
        held: list[Tensor] = []
        sizes = sizes_of(recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v)))
        assert sizes == [half, BATCH * HEADS * LENGTH * 4]
        gradient = torch.empty_like(held[0])
        assert sizes_of(recorder, lambda: torch.autograd.backward(held[0], gradient)) == [half] * 3


def test_math_holds_scores_in_fp32() -> None:
    """A T4 has no fused kernel for bf16: q, k and v are widened, and two of the S x S are saved."""
    with on((7, 5)) as recorder:
        q, k, v = tensor(), tensor(), tensor()
        wide, scores = BATCH * HEADS * LENGTH * SIZE * 4, BATCH * HEADS * LENGTH * LENGTH * 4
        held: list[Tensor] = []
        sizes = sizes_of(recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v)))
        widened = [wide] * 3 + [wide, wide]  # scaled query, scaled key
        softmax = [scores, scores // 4, BATCH * HEADS * LENGTH]  # softmax, == -inf, empty rows; `where` is in place
        assert sizes == [*widened, scores, *softmax, wide, wide // 2, scores // 2]
        gradient = torch.empty_like(held[0])
        torch.autograd.backward(held[0], gradient)


def test_math_adds_a_causal_mask_in_place() -> None:
    with on() as recorder, sdpa_kernel(SDPBackend.MATH):
        q, k, v = (tensor(1, 1, LENGTH, SIZE, dtype=torch.float32) for _ in range(3))
        scores = LENGTH * LENGTH * 4
        held: list[Tensor] = []
        sizes = sizes_of(recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        head = LENGTH * SIZE * 4
        mask = [LENGTH * LENGTH] * 3 + [scores]  # ones, tril, not, where
        softmax = [scores, LENGTH * LENGTH, LENGTH]
        assert sizes == [head, *mask, head, scores, *softmax, head]


def test_math_repeats_grouped_keys() -> None:
    with on(), sdpa_kernel(SDPBackend.MATH):
        q, k, v = tensor(), tensor(BATCH, 2, LENGTH, SIZE), tensor(BATCH, 2, LENGTH, SIZE)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.autograd.backward(out.sum())
        assert k.grad is not None
        assert k.grad.shape == k.shape


def test_refuses_what_no_kernel_can_run() -> None:
    with on((7, 5)), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q = tensor()
        with pytest.raises(RuntimeError, match=r"no attention kernel that is switched on can run on c \(flash: sm75"):
            F.scaled_dot_product_attention(q, q, q)


def test_a_transformer_layer_trains() -> None:
    with on():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1, device="cuda:0")
        x = torch.empty(2, 16, 64, device="cuda:0", requires_grad=True)
        torch.autograd.backward(layer(x).sum())
        heads = nn.MultiheadAttention(64, 4, batch_first=True, dropout=0.1, device="cuda:0")
        torch.autograd.backward(heads(x, x, x, need_weights=True)[0].sum())


def test_a_frozen_encoder_runs_in_evaluation() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with on(), torch.no_grad():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="cuda:0")
        encoder = nn.TransformerEncoder(layer, 2).eval()
        padding = torch.zeros(2, 16, dtype=torch.bool, device="cuda:0")
        out = encoder(torch.empty(2, 16, 64, device="cuda:0"), src_key_padding_mask=padding)
        assert out.shape == (2, 16, 64)
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_grouped_queries_with_a_mask_are_fused_from_2_15_on() -> None:
    with on() as recorder:
        q = tensor(dtype=torch.float32)
        k, v = (tensor(BATCH, 2, LENGTH, SIZE, dtype=torch.float32) for _ in range(2))
        mask = torch.empty(LENGTH, LENGTH, device="cuda:0")
        held: list[Tensor] = []
        sizes = sizes_of(
            recorder,
            lambda: held.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)),
        )
        fused = BATCH * HEADS * LENGTH * LENGTH * 4 not in sizes
        assert fused == (torch_release() >= (2, 15))
        torch.autograd.backward(held[0].sum())
        assert k.grad is not None
        assert k.grad.shape == k.shape


def test_padded_encoder_under_autocast() -> None:
    with on(), torch.autocast("cuda", dtype=torch.bfloat16):
        layer = nn.MultiheadAttention(64, 4, batch_first=True, device="cuda:0")
        x = torch.empty(2, 16, 64, device="cuda:0", requires_grad=True)
        padding, mask = (torch.zeros(*shape, dtype=torch.bool, device="cuda:0") for shape in ((2, 16), (16, 16)))
        out = layer(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
        assert out.dtype == torch.bfloat16
        torch.autograd.backward(out.sum())
