"""`scaled_dot_product_attention` as on a card: the kernel that CUDA would choose, and what it copies and saves.

Source of the choice: sdp_utils.cpp and sdp_utils_cpp.h in ATen/native/transformers. A rule that came with a PyTorch
release has a row in `releases.RULES`. Nested tensors are not modelled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.simulation.cards import Card, CardInUse
from autoaccum.simulation.operators.operator_call import Handler, OperatorCall, before_outputs, bytes_of
from autoaccum.simulation.releases import Release, holds
from autoaccum.simulation.torch_patches import cudnn_version, is_strictly_deterministic
from autoaccum.simulation.trace_records import Freed, MemoryStep, OutputAllocated, Workspace

Kernel: TypeAlias = Literal["math", "flash", "efficient", "cudnn"]
_KERNELS: tuple[Kernel, ...] = ("math", "flash", "efficient", "cudnn")
"""In the order of their numbers in PyTorch (`SDPBackend`)."""
_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
_HALVES = frozenset((torch.float16, torch.bfloat16))
_NEWEST_CAPABILITY = (12, 1)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of `scaled_dot_product_attention` on a card, in a release of PyTorch, with a cuDNN such as 92600."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    card: Card
    torch_version: Release
    cudnn_version: int

    def follows(self, rule: str) -> bool:
        """Return whether the release follows a rule of `releases.RULES`."""
        return holds(rule, self.torch_version)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs; three dimensions may be a batch of one."""
        shapes = [tuple(tensor.shape) for tensor in self.inputs]
        unbatched = self.follows("fused_unbatched_attention") and all(len(shape) == 3 for shape in shapes)
        return [(1, *shape) for shape in shapes] if unbatched else shapes

    @cached_property
    def mask_shape(self) -> tuple[int, ...]:
        """Return the shape of the mask, with as many dimensions as `shapes` have if one was added to them."""
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
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    @property
    def is_plain(self) -> bool:
        """Return whether the inputs have four dimensions each, and no sequence is empty."""
        return all(len(shape) == 4 and 0 not in shape[-2:-1] for shape in self.shapes[:2]) and len(self.shapes[2]) == 4

    def has_dtype_of(self, *dtypes: torch.dtype) -> bool:
        """Return whether all inputs have the same dtype, and it is one of `dtypes`; bf16 needs sm80 or newer."""
        given = {tensor.dtype for tensor in self.inputs}
        allowed = {dtype for dtype in dtypes if dtype is not torch.bfloat16 or self.card.capability >= (8, 0)}
        return len(given) == 1 and given <= allowed

    def has_heads(self, *, grouped: bool, alike: bool) -> bool:
        """Return whether the numbers of heads match (`check_batch_size_and_num_heads_dense`)."""
        if len({shape[0] for shape in self.shapes}) != 1:
            return False
        query, key, value = (shape[-3] for shape in self.shapes)
        if self.grouped and grouped:
            divides = key > 0 and query % key == 0 and value > 0 and query % value == 0
            return divides and (key == value or not alike)
        return query == key == value or (self.follows("efficient_grouped_queries") and grouped and key == value == 1)

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
    misaligned = call.follows("aligned_efficient_attention") and capability >= (8, 0) and any(offsets)
    return (
        call.is_plain
        and (5, 0) <= capability <= _NEWEST_CAPABILITY
        and query == key > 0
        and value > 0
        and query % multiple == value % multiple == 0
        and not misaligned
        and call.has_dense_rows(single_counts=False)
        and call.has_heads(grouped=call.follows("efficient_grouped_queries"), alike=True)
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
    exact = not call.follows("cudnn_dropout_in_sixteenths") or (call.dropout * 16).is_integer()
    return (
        call.is_plain
        and not is_strictly_deterministic()
        and call.has_dtype_of(*_HALVES)
        and _cudnn_takes_mask(call)
        and (8, 0) <= call.card.capability <= _NEWEST_CAPABILITY
        and (not call.dropout or (exact and not 91_100 < version < 91_400))  # None with cuDNN 9.11 to 9.13.
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
    newer, hopper = call.follows("cudnn_heads_of_256"), (major, minor) == (9, 0)
    (*outer, queries, _), keys = call.shapes[0], call.shapes[1][2]
    if call.follows("cudnn_at_most_65535") and max(outer) > 65_535:
        return False
    decodes = 91_900 <= version <= 92_500 and version != 92_401 and major in (10, 11)
    if queries == 1 and decodes and call.follows("cudnn_without_single_queries"):
        return False
    # Heads of 256: sm90 and sm10x, cuDNN after 9.22.
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
    call: AttentionCall, enabled: Sequence[Kernel] = _KERNELS, order: Sequence[Kernel] = _ORDER
) -> Kernel | None:
    """Return the kernel that CUDA would run (`select_sdp_backend`); None if no enabled kernel can.

    On sm90 and sm10x, cuDNN comes first if it is newer than 9.15 (`check_prefer_cudnn_attention`). In 2.9 it does if
    PyTorch was compiled with 9.9 or newer, which the default wheel was not; this is not modelled.
    """
    major, minor = call.card.capability
    can_prefer = major in (9, 10) and (minor in (0, 3) or call.follows("cudnn_first_on_sm10x"))
    preferred = can_prefer and call.cudnn_version > 91_500 and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if preferred and tuple(order) == _ORDER:
        order = ("cudnn", "flash", "efficient", "math")
    return next((kernel for kernel in order if kernel in enabled and _CAN[kernel](call)), None)


def scaled_dot_product_attention(
    in_use: CardInUse,
    torch_version: Release,
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
    """Run `scaled_dot_product_attention` in ATen/native/transformers/attention.cpp."""
    options: dict[str, Any] = {"mask": attn_mask, "dropout": dropout_p, "causal": is_causal, "grouped": enable_gqa}
    options |= {"torch_version": torch_version, "cudnn_version": cudnn_version(torch_version)}
    call = AttentionCall(query=query, key=key, value=value, card=in_use.card, **options)
    order = [_KERNELS[number] for number in map(int, torch._C._get_sdp_priority_order()) if number < len(_KERNELS)]
    names = {"efficient": "mem_efficient"}
    enabled = [kernel for kernel in _KERNELS if getattr(torch._C, f"_get_{names.get(kernel, kernel)}_sdp_enabled")()]
    kernel = in_use.choose(lambda card: choose_attention(replace(call, card=card), enabled, order))
    if kernel is None:
        raise RuntimeError(f"no enabled attention kernel can run on {call.card.name}: enable another one")
    if kernel == "math":
        return _math(call, scale)
    if unbatched := query.dim() == 3:
        call = replace(call, query=query.unsqueeze(0), key=key.unsqueeze(0), value=value.unsqueeze(0))
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    out = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}[kernel](call, scale)
    return out.squeeze(0) if unbatched else out


def _flash(call: AttentionCall, scale: float) -> Tensor:
    """Run flash attention on heads padded to a multiple of 8; backward keeps the padded copies (`pad_last_dim`)."""
    size, options = call.query.size(-1), (call.dropout, call.causal, False)
    padded = [F.pad(tensor, (0, -size % 8)) if size % 8 else tensor for tensor in call.inputs]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(*padded, *options, scale=scale)[0]
    return out[..., :size] if size % 8 else out


def _efficient(call: AttentionCall, scale: float) -> Tensor:
    mask = call.mask
    if mask is not None:
        mask = _additive(mask, call.query.dtype)
        # The kernel can read only such strides (`aligned_tensor<8>`).
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, 8 - mask.size(-1) % 8))[..., : mask.size(-1)]
        mask = mask.expand(*call.query.shape[:3], call.key.size(2))
    args = *call.inputs, mask, call.trains, call.dropout, call.causal
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*args, scale=scale)[0]
    return out


def _cudnn(call: AttentionCall, scale: float) -> Tensor:
    mask = None if call.mask is None else _additive(call.mask, call.query.dtype)
    args = *call.inputs, mask, call.trains, call.dropout, call.causal, False
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(*args, scale=scale)[0]
    return out


def _math(call: AttentionCall, scale: float | None) -> Tensor:
    """Compute scores of queries x keys, in fp32 for half precision (`_scaled_dot_product_attention_math`).

    The steps are written out here because C++ adds the mask in place for CUDA tensors only. Each name stays bound for
    as long as the tensor of that name lives in C++.
    """
    query, mask = call.query, call.mask
    if call.causal and mask is not None:
        raise RuntimeError("scaled_dot_product_attention takes a mask or is_causal=True, not both")
    dtype = query.dtype
    mask = None if mask is None else _additive(mask, dtype)
    factor = math.sqrt(abs(1 / math.sqrt(query.size(-1)) if scale is None else scale))
    query_acc, key_acc, value_acc = (_accumulated(tensor) for tensor in call.inputs)
    scaled = query_acc * (-factor if scale is not None and scale < 0 else factor)
    if call.causal:
        # Not ones: the simulation would compute the mask with them, which takes longer than all else, and nobody reads.
        mask = torch.empty(query.size(-2), call.key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, scaled.dtype)
    key_acc, value_acc = (_repeated(scaled, tensor, call.grouped) for tensor in (key_acc, value_acc))
    scores = torch.matmul(scaled, key_acc.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = _SafeSoftmax.apply(scores)  # type: ignore[no-untyped-call]
    if call.dropout > 0:
        scores = torch.dropout(scores, call.dropout, True)
    out, weights = torch.matmul(scores, value_acc).to(dtype), scores.to(dtype)
    del weights
    return out


class _SafeSoftmax(torch.autograd.Function):
    """`_safe_softmax` with its intermediate tensors, which C++ hides within one operator."""

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
    """Repeat the heads of keys or values (`pre_process_group_query_attention_input`)."""
    times = query.size(-3) // tensor.size(-3) if grouped and query.dim() >= 3 else 1
    return torch.repeat_interleave(tensor, times, dim=-3) if times > 1 else tensor


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into one that is added (`convert_boolean_attn_mask`)."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device))


def _flash_workspaces(call: OperatorCall) -> list[MemoryStep]:
    """Partial outputs come before the state of the random numbers (`mha_fwd` in flash_attn/flash_api.cpp)."""
    query, key = call["query"], call["key"]
    if query.dim() != 4 or call["dropout_p"]:
        return []
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, queries, key.shape[2], size)
    splits = Workspace("flash_split_sums", numbers), Workspace("flash_splits", numbers)
    return [OutputAllocated(0), OutputAllocated(1), *splits, OutputAllocated()]


def _flash_gradient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    batch, heads, queries, size = call["query"].shape
    workspaces = before_outputs(_copies_of_rows(call["grad_out"], call["out"]))
    workspaces.append(Workspace("flash_row_sums", (batch, heads, queries)))
    workspaces.append(Workspace("flash_gradient", (batch, heads, queries, size, int(is_strictly_deterministic()))))
    return workspaces + _grouped_gradients(call)


def _grouped_gradients(call: OperatorCall) -> list[Workspace]:
    """The gradients of keys and values for each head of the queries, where these share heads."""
    (batch, heads, *_), grouped = call["query"].shape, (call["key"], call["value"])
    shapes = [
        (batch, heads, *tensor.shape[2:], tensor.dtype.itemsize) for tensor in grouped if tensor.shape[1] != heads
    ]
    return [Workspace("flash_grouped", shape) for shape in shapes]


def _efficient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    """Seed and offset of the dropout, the other outputs, stay on the host."""
    query, value = call["query"], call["value"]
    batch, heads, queries, _ = query.shape
    in_fp32 = Workspace("efficient_output", (batch, heads, queries, value.shape[3], query.dtype.itemsize))
    return [OutputAllocated(0), OutputAllocated(1), in_fp32]


def _efficient_gradient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    """The row sums of output times gradient come first if no kernel sums them; the rest is freed again."""
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, size = query.shape
    flags = (query.dtype.itemsize, int(bool(call["dropout_p"])), int(is_strictly_deterministic()))
    numbers = (batch, heads, queries, key.shape[2], size, value.shape[3], *flags)
    names = ("cast", "cast", "product", "product_sums")
    products = [Workspace(f"efficient_{name}", numbers) for name in names]
    sums = Workspace("efficient_row_sums", (batch, heads, queries))
    before = [*before_outputs(_copies_of_rows(call["grad_out_"])), *_grouped_gradients(call)]
    return [*before, sums, *products, Freed(len(products)), Workspace("efficient_gradient", numbers)]


def _cudnn_gradient_workspaces(call: OperatorCall) -> list[Workspace]:
    query, key = call["query"], call["key"]
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, key.shape[1], queries, key.shape[2], size, query.dtype.itemsize)
    return [Workspace("cudnn_gradient", numbers)]


def _copies_of_rows(*tensors: Tensor) -> list[Workspace]:
    """Return a copy for each tensor (samples, heads, rows, size) that is not contiguous with rows before heads."""
    return [Workspace("layout_copy", (bytes_of(tensor),)) for tensor in tensors if not _rows_come_first(tensor)]


def _rows_come_first(tensor: Tensor) -> bool:
    _, heads, rows, size = tensor.shape
    wanted = (rows * heads * size, size, heads * size, 1)
    dimensions = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    return all(extent == 1 or stride == right for extent, stride, right in dimensions)


WORKSPACES: Mapping[str, Handler] = {
    "_scaled_dot_product_flash_attention": _flash_workspaces,
    "_scaled_dot_product_flash_attention_backward": _flash_gradient_workspaces,
    "_scaled_dot_product_efficient_attention": _efficient_workspaces,
    "_scaled_dot_product_efficient_attention_backward": _efficient_gradient_workspaces,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_gradient_workspaces,
}
