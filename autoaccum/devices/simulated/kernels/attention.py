"""`scaled_dot_product_attention` as on a card: the kernel that CUDA would run, with what it copies and saves.

The choice is that of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`. Where a rule came
with a release, the release stands beside it. Nested tensors are not modelled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.patches import cudnn_version, is_strictly_deterministic, torch_release

Kernel: TypeAlias = Literal["math", "flash", "efficient", "cudnn"]
_KERNELS: tuple[Kernel, ...] = ("math", "flash", "efficient", "cudnn")
"""As PyTorch numbers them (`SDPBackend`)."""
_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
_HALVES = frozenset((torch.float16, torch.bfloat16))
_NEWEST_CAPABILITY = (12, 1)


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Decide by the card, not by the device that C++ sees.

    Encoders in evaluation without gradients go the way of training, since their fast path asks masks for values.
    """
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        register("scaled_dot_product_attention", partial(_attention, card), key)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of `scaled_dot_product_attention` on a card, under a torch such as (2, 15) with a cuDNN such as 92600."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    card: Card
    torch_version: tuple[int, int] = field(default_factory=torch_release)
    cudnn_version: int = field(default_factory=cudnn_version)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of the inputs; three dimensions count as a batch of one (`normalize_unbatched_input`, 2.15)."""
        shapes = [tuple(tensor.shape) for tensor in self.inputs]
        unbatched = self.torch_version >= (2, 15) and all(len(shape) == 3 for shape in shapes)
        return [(1, *shape) for shape in shapes] if unbatched else shapes

    @cached_property
    def mask_shape(self) -> tuple[int, ...]:
        """That of the mask, in as many dimensions as the inputs have where one was added to these."""
        assert self.mask is not None
        shape = tuple(self.mask.shape)
        return (1,) * (4 - len(shape)) + shape if self.query.dim() < len(self.shapes[0]) else shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The head sizes of query, key and value."""
        return tuple(shape[-1] for shape in self.shapes)

    @property
    def trains(self) -> bool:
        """Return whether any of query, key and value is differentiated."""
        return _trains(*self.inputs)

    @property
    def is_plain(self) -> bool:
        """Return whether the inputs have four dimensions each, and no sequence is empty."""
        return all(len(shape) == 4 and 0 not in shape[-2:-1] for shape in self.shapes[:2]) and len(self.shapes[2]) == 4

    def has_dtype_of(self, *dtypes: torch.dtype) -> bool:
        """Return whether all inputs have the same dtype, and one of these; bf16 takes a card from sm80 on."""
        own = {tensor.dtype for tensor in self.inputs}
        known = {dtype for dtype in dtypes if dtype is not torch.bfloat16 or self.card.capability >= (8, 0)}
        return len(own) == 1 and own <= known

    def has_heads(self, *, grouped: bool, alike: bool) -> bool:
        """`check_batch_size_and_num_heads_dense`; one head of keys needs no `enable_gqa` from 2.15 on."""
        if len({shape[0] for shape in self.shapes}) != 1:
            return False
        query, key, value = (shape[-3] for shape in self.shapes)
        if self.grouped and grouped:
            divides = key > 0 and query % key == 0 and value > 0 and query % value == 0
            return divides and (key == value or not alike)
        return query == key == value or (self.torch_version >= (2, 15) and grouped and key == value == 1)

    def has_rows(self, *, single_counts: bool) -> bool:
        """`check_last_dim_stride_equals_1_dense`."""
        dense = all(tensor.stride(-1) == 1 for tensor in self.inputs) or (single_counts and self.sizes[0] == 1)
        return dense and (self.mask is None or self.mask.stride(-1) == 1)


def _can_flash(asked: AttentionCall) -> bool:
    query, key, value = asked.sizes
    (major, minor), queries, keys = asked.card.capability, asked.shapes[0][-2], asked.shapes[1][-2]
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`
    small = (8, 6) <= (major, minor) <= (8, 9) or (12, 0) <= (major, minor) <= (12, 1)
    too_wide = small and asked.trains and query > 192 and (query <= 224 or asked.dropout > 0)
    return (
        asked.is_plain
        and asked.mask is None
        and query == key == value
        and query <= 256
        and (8, 0) <= (major, minor) <= _NEWEST_CAPABILITY
        and not too_wide
        and not (asked.causal and queries != keys)
        and asked.has_dtype_of(*_HALVES)
        and asked.has_heads(grouped=True, alike=True)
        and asked.has_rows(single_counts=True)
    )


def _can_efficient(asked: AttentionCall) -> bool:
    query, key, value = asked.sizes
    capability, multiple = asked.card.capability, _alignment(asked.query.dtype, asked.card.capability)
    offsets = [tensor.storage_offset() % multiple for tensor in asked.inputs]
    # `check_data_ptr_alignment_mem_efficient`, from 2.15 on
    crooked = asked.torch_version >= (2, 15) and capability >= (8, 0) and any(offsets)
    return (
        asked.is_plain
        and (5, 0) <= capability <= _NEWEST_CAPABILITY
        and query == key > 0
        and value > 0
        and query % multiple == value % multiple == 0
        and not crooked
        and asked.has_rows(single_counts=False)
        and asked.has_heads(grouped=asked.torch_version >= (2, 15), alike=True)
        and asked.has_dtype_of(torch.float32, *_HALVES)
    )


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """The multiple that memory-efficient attention wants of a head size, in elements (`minimum_gemm_alignment`)."""
    half = dtype in _HALVES
    alignment = 4 if capability >= (8, 0) else 1
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    return max(alignment, 8 if half else 4) if tensor_cores else alignment


def _can_cudnn(asked: AttentionCall) -> bool:
    version = asked.cudnn_version
    # Sixteenths only after 2.11 (`check_cudnn_dropout`, pytorch/pytorch#174245); none with cuDNN 9.11 to 9.13.
    exact = asked.torch_version < (2, 12) or (asked.dropout * 16).is_integer()
    return (
        asked.is_plain
        and not is_strictly_deterministic()
        and asked.has_dtype_of(*_HALVES)
        and _cudnn_takes_mask(asked)
        and (8, 0) <= asked.card.capability <= _NEWEST_CAPABILITY
        and (not asked.dropout or (exact and not 91_100 < version < 91_400))
        and asked.has_rows(single_counts=True)
        and asked.has_heads(grouped=True, alike=False)
        and _cudnn_takes_shapes(asked)
    )


def _cudnn_takes_mask(asked: AttentionCall) -> bool:
    """`check_attn_mask_shape`."""
    if asked.mask is None:
        return True
    (batch, heads, queries, _), keys, shape = asked.shapes[0], asked.shapes[1][2], asked.mask_shape
    bounds = (batch, heads, queries, keys)[-len(shape) :]
    broadcasts = all(size in (1, bound) for size, bound in zip(shape, bounds, strict=False))
    return not asked.mask.requires_grad and len(shape) in (2, 4) and broadcasts


def _cudnn_takes_shapes(asked: AttentionCall) -> bool:
    """`check_cudnn_tensor_shapes`, and from 2.15 on `check_cudnn_d256_bprop_head_dim`."""
    (query, _, value), (major, minor), version = asked.sizes, asked.card.capability, asked.cudnn_version
    newer, hopper = asked.torch_version >= (2, 15), (major, minor) == (9, 0)
    (*outer, queries, _), keys = asked.shapes[0], asked.shapes[1][2]
    if newer and max(outer) > 65_535:
        return False
    # Heads of 256: 2.15, sm90 and sm10x, cuDNN after 9.22.
    big = newer and (hopper or major == 10) and version > 92_200 and not (minor == 7 and version <= 92_500)
    special = (query, value) == (192, 128)
    if big or (not newer and hopper and version >= 91_000):
        limit = 256
    else:
        limit = 192 if (major == 10 or (newer and hopper)) and version >= 91_100 and special else 128
    if max(query, value) > limit or query % 8 or value % 8 or keys == 1 or (asked.dropout and queries == 1):
        return False
    return not (big and asked.trains) or max(query, value) <= 128 or special or query == value == 256


_CAN: Mapping[Kernel, Callable[[AttentionCall], bool]] = {
    "flash": _can_flash,
    "efficient": _can_efficient,
    "cudnn": _can_cudnn,
    "math": lambda asked: True,
}


def choose_attention(
    asked: AttentionCall, enabled: Sequence[Kernel] = _KERNELS, order: Sequence[Kernel] = _ORDER
) -> Kernel | None:
    """The kernel that CUDA would run (`select_sdp_backend`); None when none that is enabled can.

    CuDNN is first on sm90 and sm10x with a cuDNN after 9.15 (`check_prefer_cudnn_attention`).
    """
    major, minor = asked.card.capability
    known = major in (9, 10) and (minor in (0, 3) or asked.torch_version >= (2, 15))
    preferred = known and asked.cudnn_version > 91_500 and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if preferred and tuple(order) == _ORDER:
        order = ("cudnn", "flash", "efficient", "math")
    return next((kernel for kernel in order if kernel in enabled and _CAN[kernel](asked)), None)


def _enabled() -> list[Kernel]:
    """Return what the process allows now."""
    flags: dict[Kernel, bool] = {
        "flash": torch._C._get_flash_sdp_enabled(),
        "efficient": torch._C._get_mem_efficient_sdp_enabled(),
        "math": torch._C._get_math_sdp_enabled(),
        "cudnn": torch._C._get_cudnn_sdp_enabled(),
    }
    return [kernel for kernel, on in flags.items() if on]


def _attention(
    card: Card,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in `aten/src/ATen/native/transformers/attention.cpp`."""
    asked = AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout=dropout_p,
        causal=is_causal,
        grouped=enable_gqa,
        card=card,
    )
    order = [_KERNELS[number] for number in map(int, torch._C._get_sdp_priority_order()) if number < len(_KERNELS)]
    kernel = choose_attention(asked, _enabled(), order)
    if kernel is None:
        raise RuntimeError(f"no attention kernel that is switched on can run on {card.name}: switch on another")
    if kernel == "math":
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if unbatched := query.dim() == 3:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    fused = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}[kernel]
    out = fused(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out.squeeze(0) if unbatched else out


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> Tensor:
    """Heads are padded to a multiple of 8; the padded copies are what backward keeps (`pad_last_dim`)."""
    size = query.size(-1)
    padded = [F.pad(tensor, (0, -size % 8)) if size % 8 else tensor for tensor in (query, key, value)]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*padded, dropout, causal, False, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> Tensor:
    if mask is not None:
        mask = _additive(mask, query.dtype)
        if not _aligned(mask):
            mask = F.pad(mask, (0, 8 - mask.size(-1) % 8))[..., : mask.size(-1)]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    given = query, key, value, mask, _trains(query, key, value), dropout, causal
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]
    return out


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float
) -> Tensor:
    mask = None if mask is None else _additive(mask, query.dtype)
    given = query, key, value, mask, _trains(query, key, value), dropout, causal, False
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(*given, scale=scale)[0]
    return out


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Scores of queries x keys, in fp32 for halves (`_scaled_dot_product_attention_math`).

    Written out because C++ adds the mask out of place for tensors like ours, and in place for CUDA's. Every name stays
    bound as long as there.
    """
    if causal and mask is not None:
        raise RuntimeError("scaled_dot_product_attention takes a mask or is_causal=True, not both")
    dtype = query.dtype
    mask = None if mask is None else _additive(mask, dtype)
    factor = math.sqrt(abs(1 / math.sqrt(query.size(-1)) if scale is None else scale))
    query_acc, key_acc, value_acc = (_accumulated(tensor) for tensor in (query, key, value))
    scaled = query_acc * (-factor if scale is not None and scale < 0 else factor)
    if causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, scaled.dtype)
    key_acc, value_acc = _repeated(scaled, key_acc, grouped), _repeated(scaled, value_acc, grouped)
    scores = torch.matmul(scaled, key_acc.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = _SafeSoftmax.apply(scores)  # type: ignore[no-untyped-call]
    if dropout > 0:
        scores = torch.dropout(scores, dropout, True)
    out, weights = torch.matmul(scores, value_acc).to(dtype), scores.to(dtype)
    del weights
    return out


class _SafeSoftmax(torch.autograd.Function):
    """`_safe_softmax` with its intermediate tensors: C++ runs them as one operator, whose insides nobody sees."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        empty = scores.isneginf()
        empty_rows = empty.all(-1, keepdim=True)
        torch.where(empty_rows, torch.zeros((), dtype=weights.dtype, device=weights.device), weights, out=weights)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], weights, -1, weights.dtype)


def _accumulated(tensor: Tensor) -> Tensor:
    halves = tensor.dtype.itemsize == 2
    return tensor.float() if halves and not torch._C._get_math_sdp_allow_fp16_bf16_reduction() else tensor


def _repeated(query: Tensor, tensor: Tensor, grouped: bool) -> Tensor:
    """`pre_process_group_query_attention_input`."""
    times = query.size(-3) // tensor.size(-3) if grouped and query.dim() >= 3 else 1
    return torch.repeat_interleave(tensor, times, dim=-3) if times > 1 else tensor


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`convert_boolean_attn_mask`."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor) -> bool:
    """`aligned_tensor<8>`: what memory-efficient attention wants of a mask's strides."""
    return all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
