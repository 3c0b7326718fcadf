"""Memory of layers and attention beside their tensors: which rule, by which numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.kernels.layers import convolution_format
from autoaccum.devices.simulated.kernels.rnn import Form
from autoaccum.devices.simulated.kernels.scratch_call import (
    Call,
    Handler,
    accumulator_bytes,
    after,
    bytes_of,
    layout_copies,
    reductions,
)
from autoaccum.devices.simulated.patches import is_strictly_deterministic
from autoaccum.devices.simulated.trace import Freed, MemoryStep, OutputAllocated, Workspace

_cudnn: Any = torch.backends.cudnn
_GATES = (1, 1, 4, 3)
"""By mode of cuDNN's recurrent networks."""
_RESERVE = 3
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FORWARD_SUMS_BYTES, _BACKWARD_SUMS_BYTES = 16, 8


def _convolution(call: Call) -> list[Workspace]:
    tensor, weight = call["input"], call["weight"]
    layout = convolution_format(tensor, weight)
    copies = layout_copies(tensor, weight, memory_format=layout)
    return copies + _workspace(call, bytes_of(tensor) + bytes_of(weight), bytes_of(call.out), layout)


def _convolution_gradient(call: Call) -> list[Workspace]:
    """Gradients of input and weight take one workspace after the other, of about the same size; the bias is a sum."""
    grad, tensor, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    layout = convolution_format(tensor, weight)
    workspaces: list[Workspace] = []
    if mask[0] or mask[1]:
        workspaces += layout_copies(grad, tensor, weight, memory_format=layout)
        workspaces += _workspace(call, bytes_of(grad) + bytes_of(weight), bytes_of(tensor), layout)
    if mask[2]:
        dims = (0, *range(2, grad.dim()))
        workspaces += reductions(grad, dims, accumulator=accumulator_bytes(grad.dtype))
    return workspaces


def _workspace(call: Call, read: int, written: int, layout: torch.memory_format) -> list[Workspace]:
    tensor, weight = call["input"], call["weight"]
    channels_last = layout != torch.contiguous_format
    if _depthwise(call) and not channels_last and tensor.dtype != torch.float16:
        return []
    tf32 = _cudnn.conv.fp32_precision != "ieee"
    flags = (int(channels_last), int(tf32), int(torch.backends.cudnn.benchmark))
    return [Workspace("convolution", (read, written, weight.dtype.itemsize, *flags))]


def _depthwise(call: Call) -> bool:
    """Tell whether PyTorch's own kernel may run instead of cuDNN's (Convolution.cpp, use_cudnn_depthwise)."""
    tensor, groups = call["input"], call["groups"]
    return bool(groups > 1 and tensor.shape[1] == groups and not call["transposed"])


def _dropout(call: Call) -> list[MemoryStep]:
    """The mask before the output (ATen/native/cuda/Dropout.cu, dropout_cuda)."""
    return [OutputAllocated(1), OutputAllocated(0)] if call["train"] is not False else []


def _layer_norm(call: Call) -> list[MemoryStep]:
    return after(layout_copies(call["input"]), call)


def _layer_norm_gradient(call: Call) -> list[MemoryStep]:
    """Partial sums for weight and bias, which are then added up one after the other."""
    tensor, shape, mask = call["input"], call["normalized_shape"], call["output_mask"]
    columns = 1
    for size in shape:
        columns *= size
    if not columns:
        return []
    numbers = (tensor.numel() // columns, columns, tensor.dtype.itemsize)
    partial, *summed = (Workspace(f"layer_norm_{name}", numbers) for name in ("gradient", "staging", "flags"))
    copies = layout_copies(call["grad_out"], call["grad_output"], tensor)
    count = sum(map(bool, mask[1:]))
    each: list[MemoryStep] = [*summed, Freed(2)]
    return [*after(copies, call), *[partial] * count, *each * count]


def _group_norm(call: Call) -> list[MemoryStep]:
    """Two factors for each channel, and for halves from 2.15 on the moments of each group in fp32.

    An input that lies channels last comes here as it is from 2.15 on (before that, `group_norm` copies it), and has
    kernels of its own.
    """
    tensor = call["input"]
    layout, each = _group_norm_layout(call), accumulator_bytes(tensor.dtype)
    steps = after(layout_copies(tensor, memory_format=layout), call)
    if tensor.dtype.itemsize < each and call.torch_version >= (2, 15):
        steps += [Workspace("group_norm", (call["N"] * call["group"], each))] * 2
    if layout != torch.contiguous_format or (call["HxW"] > 1 and (call["weight"], call["bias"]) != (None, None)):
        steps += [Workspace("group_norm", (call["N"] * call["C"], each))] * 2
    return steps


def _group_norm_gradient(call: Call) -> list[MemoryStep]:
    """Two sums for each channel; for the input's gradient two factors for each group, and one for each channel."""
    layout, each = _group_norm_layout(call), accumulator_bytes(call["input"].dtype)
    steps = after(layout_copies(call["grad_out"], call["input"], memory_format=layout), call)
    channels, groups = (Workspace("group_norm", (call["N"] * call[name], each)) for name in ("C", "group"))
    plain = layout == torch.contiguous_format
    if call["HxW"] > 1 or not plain:
        steps += [channels] * 2
    if call["output_mask"][0]:
        steps += [groups] * 2
        if plain and call["HxW"] > 1 and call["weight"] is not None:
            steps.append(channels)
    return steps


def _group_norm_layout(call: Call) -> torch.memory_format:
    if call.torch_version < (2, 15):
        return torch.contiguous_format
    layout: torch.memory_format = torch._prims_common.suggest_memory_format(call["input"])
    return layout


def _batch_norm(call: Call) -> list[Workspace]:
    return _batch_sums(call["input"], _FORWARD_SUMS_BYTES) if call["training"] else []


def _batch_norm_gradient(call: Call) -> list[Workspace]:
    return _batch_sums(call["input"], _BACKWARD_SUMS_BYTES) if call["train"] else []


def _batch_norm_by_backend(call: Call) -> list[Workspace]:
    """Kernels of cuDNN take none worth naming; PyTorch's own kernels are chosen for bf16 and for two dimensions."""
    tensor: Tensor = call["input"]
    if tensor.dtype != torch.bfloat16 and tensor.dim() != 2:
        return []
    return _batch_sums(tensor, _BACKWARD_SUMS_BYTES if call["grad_out"] is not None else _FORWARD_SUMS_BYTES)


def _cudnn_batch_norm(call: Call) -> list[Workspace]:
    """Its gradient exists for training alone, and autograd lays that of the output out before."""
    tensor: Tensor = call["input"]
    if "training" in call.signature and not call["training"]:
        return []
    channels_last = torch._prims_common.suggest_memory_format(tensor) != torch.contiguous_format
    return [Workspace("cudnn_batch_norm", (tensor.shape[1], int(channels_last)))]


def _batch_sums(tensor: Tensor, sums_bytes: int) -> list[Workspace]:
    """For channels-last data only (Normalization.cu, batch_norm_use_channels_last_kernels)."""
    layout = _CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    channels = tensor.shape[1]
    if not channels or not tensor.is_contiguous(memory_format=layout) or tensor.stride(1) != 1:
        return []
    return [Workspace("batch_norm", (tensor.numel() // channels, channels, sums_bytes))]


def _recurrent(call: Call) -> list[Workspace]:
    tensor, directions = call["input"], 2 if call["bidirectional"] else 1
    rows = tensor.numel() // max(1, tensor.shape[-1])
    numbers = rows, call["hidden_size"], _GATES[call["mode"]], directions, tensor.dtype.itemsize
    return [Workspace("recurrent", numbers)]


def _reserve(call: Call) -> list[tuple[int, Workspace]]:
    """Return how far off the reserve may be, as long as it lives."""
    share = Form(*(call[name] for name in Form._fields)).band_percent()
    return [(_RESERVE, Workspace("recurrent_reserve", (bytes_of(call.out[_RESERVE]), share)))] if call["train"] else []


BESIDE_HANDLERS: Mapping[str, Callable[[Call], list[tuple[int, Workspace]]]] = MappingProxyType(
    {"_cudnn_rnn": _reserve}
)
LAYER_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "convolution": _convolution,
        "convolution_backward": _convolution_gradient,
        "native_dropout": _dropout,
        "native_layer_norm": _layer_norm,
        "native_layer_norm_backward": _layer_norm_gradient,
        "_fused_rms_norm": _layer_norm,
        "_fused_rms_norm_backward": _layer_norm_gradient,
        "native_group_norm": _group_norm,
        "native_group_norm_backward": _group_norm_gradient,
        **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _batch_norm),
        "native_batch_norm_backward": _batch_norm_gradient,
        **dict.fromkeys(("cudnn_batch_norm", "cudnn_batch_norm_backward"), _cudnn_batch_norm),
        **dict.fromkeys(("_batch_norm_with_update", "batch_norm_backward"), _batch_norm_by_backend),
        **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward"), _recurrent),
    }
)


def _flash(call: Call) -> list[Workspace]:
    query, key = call["query"], call["key"]
    if query.dim() != 4 or call["dropout_p"]:
        return []
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, queries, key.shape[2], size)
    return [Workspace("flash_split_sums", numbers), Workspace("flash_splits", numbers)]


def _flash_gradient(call: Call) -> list[MemoryStep]:
    query, key = call["query"], call["key"]
    batch, heads, queries, size = query.shape
    workspaces = after(_copies_of_rows(call["grad_out"], call["out"]), call)
    workspaces.append(Workspace("flash_row_sums", (batch, heads, queries)))
    workspaces.append(Workspace("flash_gradient", (batch, heads, queries, size, int(is_strictly_deterministic()))))
    if key.shape[1] != heads:
        workspaces += [Workspace("flash_grouped", (batch, heads, key.shape[2], size, query.dtype.itemsize))] * 2
    return workspaces


def _efficient(call: Call) -> list[Workspace]:
    query, value = call["query"], call["value"]
    batch, heads, queries, _ = query.shape
    return [Workspace("efficient_output", (batch, heads, queries, value.shape[3], query.dtype.itemsize))]


def _efficient_gradient(call: Call) -> list[MemoryStep]:
    """Sum the rows of output times gradient first where no kernel does it, and give all back but the sums."""
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, size = query.shape
    flags = (query.dtype.itemsize, int(bool(call["dropout_p"])), int(is_strictly_deterministic()))
    numbers = (batch, heads, queries, key.shape[2], size, value.shape[3], *flags)
    names = ("cast", "cast", "product", "product_sums")
    products = [Workspace(f"efficient_{name}", numbers) for name in names]
    sums = Workspace("efficient_row_sums", (batch, heads, queries))
    copies = after(_copies_of_rows(call["grad_out_"]), call)
    return [*copies, sums, *products, Freed(len(products)), Workspace("efficient_gradient", numbers)]


def _cudnn_gradient(call: Call) -> list[Workspace]:
    query, key = call["query"], call["key"]
    batch, heads, queries, size = query.shape
    numbers = (batch, heads, key.shape[1], queries, key.shape[2], size, query.dtype.itemsize)
    return [Workspace("cudnn_gradient", numbers)]


def _copies_of_rows(*tensors: Tensor) -> list[Workspace]:
    """A copy for each tensor (samples, heads, rows, size) that is not contiguous with rows before heads."""
    return [Workspace("layout_copy", (bytes_of(tensor),)) for tensor in tensors if not _rows_come_first(tensor)]


def _rows_come_first(tensor: Tensor) -> bool:
    _, heads, rows, size = tensor.shape
    wanted = (rows * heads * size, size, heads * size, 1)
    return all(
        extent == 1 or stride == right
        for extent, stride, right in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )


ATTENTION_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_gradient,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_gradient,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_gradient,
    }
)
