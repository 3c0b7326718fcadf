"""The attention kernel that CUDA would run, and the tensors it copies and saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_up_card import make_card, on_card, sizes_of
from torch import Tensor
from torch.nn import functional as F

from autoaccum.simulation.operators.attention import AttentionCall, Kernel, choose_attention

TURING, AMPERE, GEFORCE, HOPPER = (7, 5), (8, 0), (8, 6), (9, 0)
OLD, OLDER, NEW = (2, 11), (2, 13), (2, 15)


def meta(*shape: int, dtype: str = "bfloat16", requires_grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=getattr(torch, dtype), device="meta", requires_grad=requires_grad)


def call(
    *, size: int = 64, queries: int = 128, keys: int = 128, heads: int = 12, dtype: str = "bfloat16", **changes: Any
) -> dict[str, Any]:
    made = {"query": meta(2, 12, queries, size, dtype=dtype)}
    made |= {name: meta(2, heads, keys, size, dtype=dtype) for name in ("key", "value")}
    return made | changes


def mask(*shape: int, requires_grad: bool = False) -> Tensor:
    return meta(*shape, requires_grad=requires_grad)


def choose(
    options: dict[str, Any],
    capability: tuple[int, int],
    version: tuple[int, int] = NEW,
    cudnn_version: int = 92_600,
    **allowed: Any,
) -> Kernel | None:
    made = AttentionCall(**options, card=make_card(capability), torch_version=version, cudnn_version=cudnn_version)
    return choose_attention(made, **allowed)


@pytest.mark.parametrize(
    ("why", "options", "capability", "version", "kernel"),
    [
        ("plain halves from sm80 on", call(), AMPERE, NEW, "flash"),
        ("bf16 on a T4", call(), TURING, NEW, "math"),
        ("fp16 on a T4", call(dtype="float16"), TURING, NEW, "efficient"),
        ("fp32", call(dtype="float32"), GEFORCE, NEW, "efficient"),
        ("a mask", call(mask=mask(128, 128)), GEFORCE, NEW, "efficient"),
        ("a mask that is transposed", call(mask=mask(128, 128).T), GEFORCE, NEW, "math"),
        ("causal, not square", call(queries=64, causal=True), GEFORCE, NEW, "efficient"),
        ("heads of 256", call(size=256), AMPERE, NEW, "flash"),
        ("heads of 264", call(size=264), AMPERE, NEW, "efficient"),
        ("heads of 200 do not train on sm86", call(size=200), GEFORCE, NEW, "efficient"),
        ("heads of 256 with dropout do not on sm86", call(size=256, dropout=0.1), GEFORCE, NEW, "efficient"),
        ("heads of 6 are padded for flash", call(size=6), GEFORCE, NEW, "flash"),
        ("fewer heads without enable_gqa", call(heads=4), GEFORCE, NEW, "math"),
        ("grouped queries", call(heads=4, grouped=True), GEFORCE, OLD, "flash"),
        ("grouped and masked", call(heads=4, grouped=True, mask=mask(128, 128)), GEFORCE, NEW, "efficient"),
        ("the same before 2.14", call(heads=4, grouped=True, mask=mask(128, 128)), GEFORCE, OLDER, "math"),
        ("cuDNN comes first on sm90", call(), HOPPER, NEW, "cudnn"),
        ("dropout in sixteenths", call(dropout=0.125), HOPPER, NEW, "cudnn"),
        ("other dropout", call(dropout=0.1), HOPPER, NEW, "flash"),
        ("other dropout in 2.11", call(dropout=0.1), HOPPER, OLD, "cudnn"),
        (
            "a learned mask without cuDNN",
            call(mask=mask(128, 128, requires_grad=True)),
            HOPPER,
            NEW,
            "efficient",
        ),
        ("a mask of three dimensions", call(mask=mask(1, 128, 128)), HOPPER, NEW, "efficient"),
        ("heads of 160 do not train", call(size=160), HOPPER, NEW, "flash"),
        ("heads of 160 train in 2.13", call(size=160), HOPPER, OLDER, "cudnn"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_kernel_is_the_one_that_cuda_chooses(
    why: str, options: dict[str, Any], capability: tuple[int, int], version: tuple[int, int], kernel: Kernel
) -> None:
    assert choose(options, capability, version, {OLD: 91_900, OLDER: 92_000}.get(version, 92_600)) == kernel


def test_switched_off_kernels_and_priorities_decide_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(call(), GEFORCE, enabled=("math",)) == "math"
    assert choose(call(), GEFORCE, enabled=("cudnn",)) == "cudnn"
    assert choose(call(), GEFORCE, order=("efficient", "flash", "math", "cudnn")) == "efficient"
    assert choose(call(), HOPPER, cudnn_version=91_002) == "flash"
    assert choose(call(dtype="float64"), GEFORCE, enabled=("flash", "efficient", "cudnn")) is None
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(call(), HOPPER) == "flash"


BATCH, HEADS, LENGTH, SIZE = 2, 4, 128, 64


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = True) -> Tensor:
    return torch.empty(shape or (BATCH, HEADS, LENGTH, SIZE), dtype=dtype, device="cuda:0", requires_grad=requires_grad)


def test_flash_attention_keeps_padded_copies_of_odd_heads() -> None:
    with on_card() as recorder:
        q, k, v = (tensor(BATCH, HEADS, LENGTH, 20) for _ in range(3))
        padded = BATCH * HEADS * LENGTH * 24 * 2
        held: list[Tensor] = []
        sizes = sizes_of(
            recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)), above=16
        )
        assert sizes == [padded] * 4 + [BATCH * HEADS * LENGTH * 4]
        assert held[0].shape == (BATCH, HEADS, LENGTH, 20)
        torch.autograd.backward(held[0], torch.empty(BATCH, HEADS, LENGTH, 20, dtype=torch.bfloat16, device="cuda:0"))
        assert q.grad is not None
        assert q.grad.shape == q.shape


def test_math_attention_keeps_scores_in_fp32() -> None:
    """A T4 has no fused kernel for bf16: q, k and v are widened, and two of the S x S are saved."""
    with on_card((7, 5)) as recorder:
        q, k, v = tensor(), tensor(), tensor()
        wide, scores = BATCH * HEADS * LENGTH * SIZE * 4, BATCH * HEADS * LENGTH * LENGTH * 4
        held: list[Tensor] = []
        sizes = sizes_of(recorder, lambda: held.append(F.scaled_dot_product_attention(q, k, v)), above=16)
        widened = [wide] * 3 + [wide, wide]  # scaled query, scaled key
        softmax = [scores, scores // 4, BATCH * HEADS * LENGTH]  # softmax, == -inf, empty rows; `where` is in place
        assert sizes == [*widened, scores, *softmax, wide, wide // 2, scores // 2]
        gradient = torch.empty_like(held[0])
        torch.autograd.backward(held[0], gradient)
