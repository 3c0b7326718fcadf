"""`scaled_dot_product_attention` as on a card: the kernel that CUDA would run, with what it copies and saves."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels.attention_choice import (
    AttentionCall,
    Backends,
    Kernel,
    Operand,
    choose_attention,
)
from autoaccum.devices.simulated.patches import cudnn_version, is_strictly_deterministic, torch_release

_NAMES: dict[int, Kernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_DEFAULT_PRIORITY = [1, 2, 0, 3]


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Decide by the card, not by the device that C++ sees.

    Encoders in evaluation without gradients go the way of training, since their fast path asks masks for values.
    """
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        register("scaled_dot_product_attention", partial(_attention, card), key)


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
    call = AttentionCall(
        query=_operand(query),
        key=_operand(key),
        value=_operand(value),
        mask=None if attn_mask is None else _operand(attn_mask, is_mask=True),
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    choice = choose_attention(call, card, torch_release(), _backends())
    if choice.kernel is None:
        reasons = "; ".join(f"{kernel}: {reason}" for kernel, reason in choice.refused.items())
        raise RuntimeError(f"no attention kernel that is switched on can run on {card.name} ({reasons})")
    if choice.kernel == "math":
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if unbatched := query.dim() == 3:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    fused = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}[choice.kernel]
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


def _operand(tensor: Tensor, *, is_mask: bool = False) -> Operand:
    return Operand(
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        offset=int(tensor.storage_offset()),
        requires_grad=tensor.requires_grad and (is_mask or torch.is_grad_enabled()),
    )


def _backends() -> Backends:
    """Return what the process allows now."""
    flags: dict[Kernel, bool] = {
        "flash": torch._C._get_flash_sdp_enabled(),
        "efficient": torch._C._get_mem_efficient_sdp_enabled(),
        "math": torch._C._get_math_sdp_enabled(),
        "cudnn": torch._C._get_cudnn_sdp_enabled(),
    }
    priority = [int(number) for number in torch._C._get_sdp_priority_order() if int(number) in _NAMES]
    return Backends(
        enabled=frozenset(kernel for kernel, on in flags.items() if on),
        order=None if priority == _DEFAULT_PRIORITY else tuple(_NAMES[number] for number in priority),
        deterministic=is_strictly_deterministic(),
        prefers_cudnn=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
        cudnn_version=cudnn_version(),
    )
