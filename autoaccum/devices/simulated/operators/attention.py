"""`scaled_dot_product_attention` as on a card: what each kernel copies, saves and takes as workspace.

The choice of the kernel is in attention_kernel.py, the sizes of workspaces in attention_workspace.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.operators.attention_kernel import (
    KERNELS,
    AttentionCall,
    Kernel,
    choose_attention,
)
from autoaccum.devices.simulated.operators.workspaces import Handler, OperatorCall, before_outputs, bytes_of
from autoaccum.devices.simulated.patches import is_strictly_deterministic
from autoaccum.devices.simulated.trace import Freed, MemoryStep, Workspace


def install(library: torch.library.Library, stack: ExitStack) -> None:
    """Run encoders in evaluation as in training, because their fast path reads the values of masks."""
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)


def _enabled() -> list[Kernel]:
    """Return the kernels that the process has switched on."""
    flags: dict[Kernel, bool] = {
        "flash": torch._C._get_flash_sdp_enabled(),
        "efficient": torch._C._get_mem_efficient_sdp_enabled(),
        "math": torch._C._get_math_sdp_enabled(),
        "cudnn": torch._C._get_cudnn_sdp_enabled(),
    }
    return [kernel for kernel, on in flags.items() if on]


def scaled_dot_product_attention(
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
    """Run `scaled_dot_product_attention` in ATen/native/transformers/attention.cpp."""
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout=dropout_p,
        causal=is_causal,
        grouped=enable_gqa,
        card=card,
    )
    order = [KERNELS[number] for number in map(int, torch._C._get_sdp_priority_order()) if number < len(KERNELS)]
    kernel = choose_attention(call, _enabled(), order)
    if kernel is None:
        raise RuntimeError(f"no enabled attention kernel can run on {card.name}: enable another one")
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
        if not _aligned(mask):
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
        mask = torch.ones(query.size(-2), call.key.size(-2), dtype=torch.bool, device=query.device).tril()
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


def _aligned(mask: Tensor) -> bool:
    """Return whether memory-efficient attention can read the strides of a mask (`aligned_tensor<8>`)."""
    return all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1


def _flash_workspaces(call: OperatorCall) -> list[Workspace]:
    query, key = call["query"], call["key"]
    if query.dim() != 4 or call["dropout_p"]:
        return []
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, queries, key.shape[2], size)
    return [Workspace("flash_split_sums", numbers), Workspace("flash_splits", numbers)]


def _flash_gradient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    query, key = call["query"], call["key"]
    batch, heads, queries, size = query.shape
    workspaces = before_outputs(_copies_of_rows(call["grad_out"], call["out"]), call)
    workspaces.append(Workspace("flash_row_sums", (batch, heads, queries)))
    workspaces.append(Workspace("flash_gradient", (batch, heads, queries, size, int(is_strictly_deterministic()))))
    if key.shape[1] != heads:
        workspaces += [Workspace("flash_grouped", (batch, heads, key.shape[2], size, query.dtype.itemsize))] * 2
    return workspaces


def _efficient_workspaces(call: OperatorCall) -> list[Workspace]:
    query, value = call["query"], call["value"]
    batch, heads, queries, _ = query.shape
    return [Workspace("efficient_output", (batch, heads, queries, value.shape[3], query.dtype.itemsize))]


def _efficient_gradient_workspaces(call: OperatorCall) -> list[MemoryStep]:
    """The row sums of output times gradient come first if no kernel sums them; the rest is freed again."""
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, size = query.shape
    flags = (query.dtype.itemsize, int(bool(call["dropout_p"])), int(is_strictly_deterministic()))
    numbers = (batch, heads, queries, key.shape[2], size, value.shape[3], *flags)
    names = ("cast", "cast", "product", "product_sums")
    products = [Workspace(f"efficient_{name}", numbers) for name in names]
    sums = Workspace("efficient_row_sums", (batch, heads, queries))
    copies = before_outputs(_copies_of_rows(call["grad_out_"]), call)
    return [*copies, sums, *products, Freed(len(products)), Workspace("efficient_gradient", numbers)]


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
    return all(
        extent == 1 or stride == right
        for extent, stride, right in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )


WORKSPACES: Mapping[str, Handler] = {
    "_scaled_dot_product_flash_attention": _flash_workspaces,
    "_scaled_dot_product_flash_attention_backward": _flash_gradient_workspaces,
    "_scaled_dot_product_efficient_attention": _efficient_workspaces,
    "_scaled_dot_product_efficient_attention_backward": _efficient_gradient_workspaces,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_gradient_workspaces,
}
