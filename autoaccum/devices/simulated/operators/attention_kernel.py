"""The attention kernel that CUDA would choose for a call of `scaled_dot_product_attention`.

Source: sdp_utils.cpp and sdp_utils_cpp.h in ATen/native/transformers. A rule that came with a PyTorch release names it.
Nested tensors are not modelled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.patches import cudnn_version, is_strictly_deterministic, torch_release

Kernel: TypeAlias = Literal["math", "flash", "efficient", "cudnn"]
KERNELS: tuple[Kernel, ...] = ("math", "flash", "efficient", "cudnn")
"""In the order of their numbers in PyTorch (`SDPBackend`)."""
_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
_HALVES = frozenset((torch.float16, torch.bfloat16))
_NEWEST_CAPABILITY = (12, 1)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of `scaled_dot_product_attention` on a card, by releases of PyTorch (2, 15) and cuDNN (92600)."""

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
        """Return query, key and value."""
        return self.query, self.key, self.value

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs; three dimensions are a batch of one (`normalize_unbatched_input`, 2.15)."""
        shapes = [tuple(tensor.shape) for tensor in self.inputs]
        unbatched = self.torch_version >= (2, 15) and all(len(shape) == 3 for shape in shapes)
        return [(1, *shape) for shape in shapes] if unbatched else shapes

    @cached_property
    def mask_shape(self) -> tuple[int, ...]:
        """Return the shape of the mask, with as many dimensions as `shapes` have if one was added to them."""
        assert self.mask is not None
        shape = tuple(self.mask.shape)
        return (1,) * (4 - len(shape)) + shape if self.query.dim() < len(self.shapes[0]) else shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the head sizes of query, key and value."""
        return tuple(shape[-1] for shape in self.shapes)

    @property
    def trains(self) -> bool:
        """Return whether any of query, key and value is differentiated."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    @property
    def is_plain(self) -> bool:
        """Return whether the inputs have four dimensions each, and no sequence is empty."""
        return all(len(shape) == 4 and 0 not in shape[-2:-1] for shape in self.shapes[:2]) and len(self.shapes[2]) == 4

    def has_dtype_of(self, *dtypes: torch.dtype) -> bool:
        """Return whether all inputs have the same dtype, and it is one of `dtypes`; bf16 needs sm80 or newer."""
        own = {tensor.dtype for tensor in self.inputs}
        known = {dtype for dtype in dtypes if dtype is not torch.bfloat16 or self.card.capability >= (8, 0)}
        return len(own) == 1 and own <= known

    def has_heads(self, *, grouped: bool, alike: bool) -> bool:
        """Return whether the numbers of heads match (`check_batch_size_and_num_heads_dense`)."""
        if len({shape[0] for shape in self.shapes}) != 1:
            return False
        query, key, value = (shape[-3] for shape in self.shapes)
        if self.grouped and grouped:
            divides = key > 0 and query % key == 0 and value > 0 and query % value == 0
            return divides and (key == value or not alike)
        # From 2.15 on, one head of keys needs no `enable_gqa`.
        return query == key == value or (self.torch_version >= (2, 15) and grouped and key == value == 1)

    def has_dense_rows(self, *, single_counts: bool) -> bool:
        """Return whether rows are dense (`check_last_dim_stride_equals_1_dense`)."""
        dense = all(tensor.stride(-1) == 1 for tensor in self.inputs) or (single_counts and self.sizes[0] == 1)
        return dense and (self.mask is None or self.mask.stride(-1) == 1)


def _can_flash(call: AttentionCall) -> bool:
    query, key, value = call.sizes
    (major, minor), queries, keys = call.card.capability, call.shapes[0][-2], call.shapes[1][-2]
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`
    small = (8, 6) <= (major, minor) <= (8, 9) or (12, 0) <= (major, minor) <= (12, 1)
    too_wide = small and call.trains and query > 192 and (query <= 224 or call.dropout > 0)
    return (
        call.is_plain
        and call.mask is None
        and query == key == value
        and query <= 256
        and (8, 0) <= (major, minor) <= _NEWEST_CAPABILITY
        and not too_wide
        and not (call.causal and queries != keys)
        and call.has_dtype_of(*_HALVES)
        and call.has_heads(grouped=True, alike=True)
        and call.has_dense_rows(single_counts=True)
    )


def _can_efficient(call: AttentionCall) -> bool:
    query, key, value = call.sizes
    capability, multiple = call.card.capability, _alignment(call.query.dtype, call.card.capability)
    offsets = [tensor.storage_offset() % multiple for tensor in call.inputs]
    # `check_data_ptr_alignment_mem_efficient`, from 2.15 on
    misaligned = call.torch_version >= (2, 15) and capability >= (8, 0) and any(offsets)
    return (
        call.is_plain
        and (5, 0) <= capability <= _NEWEST_CAPABILITY
        and query == key > 0
        and value > 0
        and query % multiple == value % multiple == 0
        and not misaligned
        and call.has_dense_rows(single_counts=False)
        and call.has_heads(grouped=call.torch_version >= (2, 15), alike=True)
        and call.has_dtype_of(torch.float32, *_HALVES)
    )


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return the multiple that memory-efficient attention requires of a head size (`minimum_gemm_alignment`)."""
    half = dtype in _HALVES
    alignment = 4 if capability >= (8, 0) else 1
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    return max(alignment, 8 if half else 4) if tensor_cores else alignment


def _can_cudnn(call: AttentionCall) -> bool:
    version = call.cudnn_version
    # Sixteenths only after 2.11 (`check_cudnn_dropout`, pytorch/pytorch#174245); none with cuDNN 9.11 to 9.13.
    exact = call.torch_version < (2, 12) or (call.dropout * 16).is_integer()
    return (
        call.is_plain
        and not is_strictly_deterministic()
        and call.has_dtype_of(*_HALVES)
        and _cudnn_takes_mask(call)
        and (8, 0) <= call.card.capability <= _NEWEST_CAPABILITY
        and (not call.dropout or (exact and not 91_100 < version < 91_400))
        and call.has_dense_rows(single_counts=True)
        and call.has_heads(grouped=True, alike=False)
        and _cudnn_takes_shapes(call)
    )


def _cudnn_takes_mask(call: AttentionCall) -> bool:
    """Return whether cuDNN supports the mask (`check_attn_mask_shape`)."""
    if call.mask is None:
        return True
    (batch, heads, queries, _), keys, shape = call.shapes[0], call.shapes[1][2], call.mask_shape
    bounds = (batch, heads, queries, keys)[-len(shape) :]
    broadcasts = all(size in (1, bound) for size, bound in zip(shape, bounds, strict=False))
    return not call.mask.requires_grad and len(shape) in (2, 4) and broadcasts


def _cudnn_takes_shapes(call: AttentionCall) -> bool:
    """Return whether cuDNN supports the shapes (`check_cudnn_tensor_shapes`, `check_cudnn_d256_bprop_head_dim`)."""
    (query, _, value), (major, minor), version = call.sizes, call.card.capability, call.cudnn_version
    newer, hopper = call.torch_version >= (2, 15), (major, minor) == (9, 0)
    (*outer, queries, _), keys = call.shapes[0], call.shapes[1][2]
    if newer and max(outer) > 65_535:
        return False
    # Heads of 256: 2.15, sm90 and sm10x, cuDNN after 9.22.
    big = newer and (hopper or major == 10) and version > 92_200 and not (minor == 7 and version <= 92_500)
    special = (query, value) == (192, 128)
    if big or (not newer and hopper and version >= 91_000):
        limit = 256
    else:
        limit = 192 if (major == 10 or (newer and hopper)) and version >= 91_100 and special else 128
    if max(query, value) > limit or query % 8 or value % 8 or keys == 1 or (call.dropout and queries == 1):
        return False
    return not (big and call.trains) or max(query, value) <= 128 or special or query == value == 256


_CAN: Mapping[Kernel, Callable[[AttentionCall], bool]] = {
    "flash": _can_flash,
    "efficient": _can_efficient,
    "cudnn": _can_cudnn,
    "math": lambda call: True,
}


def choose_attention(
    call: AttentionCall, enabled: Sequence[Kernel] = KERNELS, order: Sequence[Kernel] = _ORDER
) -> Kernel | None:
    """Return the kernel that CUDA would run (`select_sdp_backend`); None if no enabled kernel can.

    On sm90 and sm10x, cuDNN comes first if it is newer than 9.15 (`check_prefer_cudnn_attention`).
    """
    major, minor = call.card.capability
    known = major in (9, 10) and (minor in (0, 3) or call.torch_version >= (2, 15))
    preferred = known and call.cudnn_version > 91_500 and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if preferred and tuple(order) == _ORDER:
        order = ("cudnn", "flash", "efficient", "math")
    return next((kernel for kernel in order if kernel in enabled and _CAN[kernel](call)), None)
