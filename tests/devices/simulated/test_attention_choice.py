"""Known answers of the choice of an attention kernel, rule by rule (`sdp_utils.cpp`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels.attention_choice import (
    AttentionCall,
    Backends,
    Kernel,
    Operand,
    choose_attention,
    gemm_alignment,
)

TURING, AMPERE, GEFORCE, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 6), (9, 0), (12, 0)
OLD, NEW = (2, 11), (2, 15)


def card(capability: tuple[int, int]) -> Card:
    return Card(
        name="c", title="C", total_bytes=1, capability=capability, multiprocessors=1, source="made up for a test"
    )


def operand(*shape: int, dtype: str = "bfloat16", requires_grad: bool = True, **changes: Any) -> Operand:
    strides = tuple(_product(shape[axis + 1 :]) for axis in range(len(shape)))
    return replace(Operand(shape=shape, strides=strides, dtype=dtype, requires_grad=requires_grad), **changes)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def call(
    *, size: int = 64, queries: int = 128, keys: int = 128, heads: int = 12, dtype: str = "bfloat16", **changes: Any
) -> AttentionCall:
    made = AttentionCall(
        query=operand(2, 12, queries, size, dtype=dtype),
        key=operand(2, heads, keys, size, dtype=dtype),
        value=operand(2, heads, keys, size, dtype=dtype),
    )
    return replace(made, **changes)


def mask(*shape: int, requires_grad: bool = False, **changes: Any) -> Operand:
    return operand(*shape, requires_grad=requires_grad, **changes)


ONLY_FUSED = Backends(enabled=frozenset(("flash", "efficient", "cudnn")))
ONLY_CUDNN = Backends(enabled=frozenset(("cudnn",)))


@pytest.mark.parametrize(
    ("why", "asked", "capability", "version", "kernel"),
    [
        ("plain halves from sm80 on", call(), AMPERE, NEW, "flash"),
        ("bf16 on a T4", call(), TURING, NEW, "math"),
        ("fp16 on a T4", call(dtype="float16"), TURING, NEW, "efficient"),
        ("fp32", call(dtype="float32"), GEFORCE, NEW, "efficient"),
        ("fp64", call(dtype="float64"), GEFORCE, NEW, "math"),
        ("a mask", call(mask=mask(128, 128)), GEFORCE, NEW, "efficient"),
        ("a mask that is learned", call(mask=mask(128, 128, requires_grad=True)), GEFORCE, NEW, "efficient"),
        ("a mask that is transposed", call(mask=mask(128, 128, strides=(1, 128))), GEFORCE, NEW, "math"),
        ("causal, not square", call(queries=64, is_causal=True), GEFORCE, NEW, "efficient"),
        ("causal, square", call(is_causal=True), GEFORCE, NEW, "flash"),
        ("heads of 256", call(size=256), AMPERE, NEW, "flash"),
        ("heads of 264", call(size=264), AMPERE, NEW, "efficient"),
        ("heads of 200 train not on sm86", call(size=200), GEFORCE, NEW, "efficient"),
        ("heads of 200 train on sm80", call(size=200), AMPERE, NEW, "flash"),
        ("heads of 256 train on sm86", call(size=256), GEFORCE, NEW, "flash"),
        ("heads of 256 with dropout do not on sm86", call(size=256, dropout=0.1), GEFORCE, NEW, "efficient"),
        ("heads of 256 with dropout do not on sm120", call(size=256, dropout=0.1), BLACKWELL, NEW, "efficient"),
        ("heads of 6 are padded for flash", call(size=6), GEFORCE, NEW, "flash"),
        ("heads of 6 with a mask", call(size=6, mask=mask(128, 128)), GEFORCE, NEW, "math"),
        ("an empty sequence", call(queries=0), GEFORCE, NEW, "math"),
        ("one query, one key", call(queries=1, keys=1), GEFORCE, NEW, "flash"),
        ("fewer heads without enable_gqa", call(heads=4), GEFORCE, NEW, "math"),
        ("one head of keys, before 2.15", call(heads=1), GEFORCE, OLD, "math"),
        ("one head of keys, from 2.15 on", call(heads=1), GEFORCE, NEW, "flash"),
        ("grouped queries", call(heads=4, enable_gqa=True), GEFORCE, OLD, "flash"),
        ("groups that do not divide", call(heads=5, enable_gqa=True), GEFORCE, NEW, "math"),
        ("grouped and masked", call(heads=4, enable_gqa=True, mask=mask(128, 128)), GEFORCE, NEW, "efficient"),
        ("the same before 2.15", call(heads=4, enable_gqa=True, mask=mask(128, 128)), GEFORCE, OLD, "math"),
        ("cuDNN comes first on sm90", call(), HOPPER, NEW, "cudnn"),
        ("dropout in sixteenths", call(dropout=0.125), HOPPER, NEW, "cudnn"),
        ("other dropout", call(dropout=0.1), HOPPER, NEW, "flash"),
        ("other dropout in 2.11", call(dropout=0.1), HOPPER, OLD, "cudnn"),
        ("a learned mask is not cuDNN's", call(mask=mask(128, 128, requires_grad=True)), HOPPER, NEW, "efficient"),
        ("a mask by head", call(mask=mask(1, 12, 1, 128)), HOPPER, NEW, "cudnn"),
        ("a mask of three dimensions", call(mask=mask(1, 128, 128)), HOPPER, NEW, "efficient"),
        ("heads of 160 train not", call(size=160), HOPPER, NEW, "flash"),
        ("heads of 160 train in 2.11", call(size=160), HOPPER, OLD, "cudnn"),
        ("heads of 12", call(size=12), HOPPER, NEW, "flash"),
        ("one key", call(keys=1), HOPPER, NEW, "flash"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_chooses_as_cuda_does(
    why: str, asked: AttentionCall, capability: tuple[int, int], version: tuple[int, int], kernel: Kernel
) -> None:
    backends = Backends(cudnn_version=91_900 if version == OLD else 92_600)
    assert choose_attention(asked, card(capability), version, backends).kernel == kernel


def test_inputs_without_a_batch_are_fused_from_2_15_on() -> None:
    asked = AttentionCall(query=operand(12, 128, 64), key=operand(12, 128, 64), value=operand(12, 128, 64))
    assert choose_attention(asked, card(GEFORCE), OLD, Backends()).kernel == "math"
    assert choose_attention(asked, card(GEFORCE), NEW, Backends()).kernel == "flash"


def test_heads_that_are_not_contiguous_take_the_math() -> None:
    tilted = operand(2, 12, 128, 64, strides=(12 * 128 * 64, 128 * 64, 1, 128))
    assert choose_attention(replace(call(), key=tilted), card(GEFORCE), NEW, Backends()).kernel == "math"


def test_efficient_attention_wants_an_aligned_start_from_2_15_on() -> None:
    asked = replace(call(dtype="float32"), key=operand(2, 12, 128, 64, dtype="float32", offset=3))
    assert choose_attention(asked, card(GEFORCE), OLD, Backends()).kernel == "efficient"
    refused = choose_attention(asked, card(GEFORCE), NEW, Backends()).refused
    assert refused["efficient"] == "query, key or value begins at no multiple of 4 elements"


def test_mixed_dtypes_take_the_math() -> None:
    asked = replace(call(), key=operand(2, 12, 128, 64, dtype="float32"))
    assert choose_attention(asked, card(GEFORCE), NEW, Backends()).kernel == "math"


def test_tells_why_others_were_refused() -> None:
    choice = choose_attention(call(mask=mask(128, 128), size=6), card(GEFORCE), NEW, Backends())
    assert choice.kernel == "math"
    assert dict(choice.refused) == {
        "flash": "it takes no mask",
        "efficient": "head sizes 6, 6 and 6 are no multiples of 8",
    }


def test_flags_and_priority_decide_first() -> None:
    geforce = card(GEFORCE)
    assert choose_attention(call(), geforce, NEW, Backends(enabled=frozenset(("math",)))).kernel == "math"
    assert choose_attention(call(), geforce, NEW, ONLY_CUDNN).kernel == "cudnn"
    preferred = Backends(order=("efficient", "flash", "math", "cudnn"))
    assert choose_attention(call(), geforce, NEW, preferred).kernel == "efficient"
    assert choose_attention(call(), card(HOPPER), NEW, Backends(prefers_cudnn=False)).kernel == "flash"
    assert choose_attention(call(), card(HOPPER), NEW, Backends(cudnn_version=91_002)).kernel == "flash"


def test_deterministic_mode_refuses_cudnn() -> None:
    choice = choose_attention(call(), card(HOPPER), NEW, Backends(deterministic=True))
    assert (choice.kernel, choice.refused["cudnn"]) == ("flash", "it is not deterministic")


def test_nothing_may_be_left() -> None:
    choice = choose_attention(call(dtype="float64"), card(GEFORCE), NEW, ONLY_FUSED)
    assert choice.kernel is None
    assert choice.refused["math"] == "math attention is switched off"


def test_alignment_of_head_sizes() -> None:
    assert [gemm_alignment("float16", capability) for capability in (TURING, GEFORCE)] == [8, 8]
    assert [gemm_alignment("float32", capability) for capability in ((6, 1), TURING, GEFORCE)] == [1, 1, 4]
