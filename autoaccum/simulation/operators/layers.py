"""Matrix products, convolutions and norms as on a card: the kernels, their memory formats and workspaces.

Layer, group and RMS norm have one kernel each on CUDA, with statistics like those of fake tensors. An instance norm is
a batch norm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from autoaccum.simulation.operators.cudnn import DATA_TYPES, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from autoaccum.simulation.operators.operator_call import (
    Handler,
    OperatorCall,
    accumulator_bytes,
    before_outputs,
    bytes_of,
    layout_copies,
)
from autoaccum.simulation.operators.reductions import reduction_workspaces
from autoaccum.simulation.releases import holds
from autoaccum.simulation.trace_records import Emptied, Freed, Kept, MemoryStep, OutputAllocated, Workspace

_cudnn: Any = torch.backends.cudnn
MIN_EPS = 0.0
"""`CUDNN_BN_MIN_EPSILON`, since cuDNN 7.5."""
_CUDNN, _NATIVE = 1, 0
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FORWARD_SUMS_BYTES, _BACKWARD_SUMS_BYTES = 16, 8
_BATCH = 6
"""The index of the batch size among the numbers of a convolution."""


_PRODUCTS = ("mm", "bmm", "addmm_", "baddbmm_", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "_scaled_mm")
_UNSET = -1


def _product(call: OperatorCall, *, with_bias: bool = False) -> list[MemoryStep]:
    """The workspace of a library, after copies of the operands; cuBLASLt runs a product with a bias.

    Source: ATen/cuda/CublasHandlePool.cpp. A workspace that is kept is one for each (handle, stream): one for the
    thread of forward passes, one for autograd's. Environment variables set its size, and whether it is kept and shared.
    """
    environment, release = os.environ, call.torch_version
    copies = [Workspace("layout_copy", (bytes_of(arg),)) for arg in call.args if _needs_copy(arg)]
    uses_lt = with_bias and _uses_cublaslt(call.args)
    keeps = environment.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1" or not holds("workspace_of_each_product", release)
    thread = int(keeps and torch._C._current_autograd_node() is not None)
    of_cublas = Workspace("product", (thread, configured_bytes(environment)))
    kib = re.match("[0-9]+", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    of_cublaslt = Workspace("product_with_bias", (thread, int(kib[0]) << 10 if kib else _UNSET))
    if not keeps:
        return [*copies, of_cublaslt if uses_lt else of_cublas]
    shares = holds("shared_cublaslt_workspace", release)
    kept = [Kept(of_cublas)]
    if uses_lt and not {"0": False, "1": True}.get(environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", ""), shares):
        kept = [*kept[shares:], Kept(of_cublaslt)]  # Releases that share it by default make cuBLAS's where cuBLAS runs.
    return [*kept, *copies]


def _needs_copy(tensor: Any) -> bool:
    """Return whether cuBLAS cannot read its layout (`prepare_matrix_for_cublas` in ATen/native/cuda/Blas.cpp)."""
    if not hasattr(tensor, "stride") or tensor.dim() < 2:
        return False
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    return not ((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


def _uses_cublaslt(args: Sequence[Any]) -> bool:
    """Return whether a product with a bias runs in cuBLASLt (`isInputCompliesAddmmCudaLt` in Blas.cpp)."""
    bias, left, right = args[:3]
    return bool(bias.dim() == 1 and bias.is_contiguous() and left.shape[1] > 1 and right.shape[1] > 1)


def configured_bytes(environment: Mapping[str, str]) -> int:
    """Return the bytes that `CUBLAS_WORKSPACE_CONFIG` sets; -1 if it is not set or has another form.

    >>> configured_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), configured_bytes({})
    (33554432, -1)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else _UNSET


def convolution_format(tensor: Tensor, weight: Tensor, backend: object = None) -> torch.memory_format:
    """Return the format in which a convolution runs, and which its output has: channels last if either operand is.

    `cudnn_conv_suggest_memory_format` in ATen/native/ConvUtils.h. Depthwise convolutions run in cuDNN too if they are
    channels-last (`use_cudnn_depthwise` in Convolution.cpp).
    """
    wide = torch.float64 in (tensor.dtype, weight.dtype)
    if wide or not torch._C._get_cudnn_enabled() or weight.dim() not in (4, 5):
        return torch.contiguous_format
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    return last if last in (suggest_memory_format(tensor), suggest_memory_format(weight)) else torch.contiguous_format


def _convolution(call: OperatorCall) -> list[MemoryStep]:
    tensor, weight, transposed = call["input"], call["weight"], call["transposed"]
    layout = convolution_format(tensor, weight)
    kind, source = (INPUT_GRADIENT, call.out) if transposed else (FORWARD, tensor)
    copies = layout_copies(tensor, weight, memory_format=layout)
    return [*before_outputs(copies), *_workspace(call, kind, source, layout)]


def _convolution_gradient(call: OperatorCall) -> list[MemoryStep]:
    """The gradients of input and weight, one after the other, and the sum for the bias.

    Source: `cudnn_convolution_backward` in ATen/native/cudnn/ConvShared.cpp.
    """
    grad, tensor, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    layout = convolution_format(tensor, weight)
    kind, source = (FORWARD, grad) if call["transposed"] else (INPUT_GRADIENT, tensor)
    copies = layout_copies(grad, memory_format=layout) if mask[0] or mask[1] else []
    steps: list[MemoryStep] = [*copies]
    for index, (part, operand) in enumerate(((kind, weight), (WEIGHT_GRADIENT, tensor))):
        if mask[index]:
            copied = layout_copies(operand, memory_format=layout)
            taken = _workspace(call, part, source, layout)
            steps += [*copied, OutputAllocated(index), *taken, Freed(len(copied) + bool(taken))]
    steps.append(Freed(len(copies)))
    if mask[2]:
        dims = (0, *range(2, grad.dim()))
        sums = reduction_workspaces(grad, dims, accumulator=accumulator_bytes(grad.dtype))
        steps += [OutputAllocated(2), *sums]
    return steps


def _workspace(call: OperatorCall, kind: int, source: Tensor, layout: torch.memory_format) -> list[MemoryStep]:
    """Return the workspace for a convolution of `source`, or one of its gradients.

    `benchmark=True` times plans at the first of its kind, and then empties the cache (`run_single_conv` in
    ATen/native/cudnn/Conv_v8.cpp; before it, `findAlgorithms` in Conv_v7.cpp). In PyTorch, each batch size is of a kind
    of its own. Here one stands for all, so that traces of two sizes are alike.
    """
    tensor, weight = call["input"], call["weight"]
    channels_last = layout != torch.contiguous_format
    # PyTorch's own kernel, or one of cuDNN's for fp16 that takes nothing (`use_cudnn_depthwise` in Convolution.cpp).
    depthwise = call["groups"] > 1 and tensor.shape[1] == call["groups"] and not call["transposed"]
    if depthwise and not channels_last:
        return []
    deterministic = call.deterministic or torch.backends.cudnn.deterministic
    flags = (channels_last, _cudnn.conv.fp32_precision != "ieee", deterministic, torch.backends.cudnn.benchmark)
    missing = max(0, 4 - source.dim())  # One dimension is the second of two (`view4d` in Convolution.cpp).
    shapes = [(*shape[:2], *[1] * missing, *shape[2:]) for shape in (source.shape, weight.shape)]
    count = source.dim() - 2
    windows = [
        (*[default] * missing, *[*call[name]] * (count // len(call[name])))
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    data_type = DATA_TYPES.get(str(weight.dtype), -1)
    taken = Workspace("convolution", (kind, data_type, *map(int, flags), *chain(*shapes, *windows)))
    if not torch.backends.cudnn.benchmark:
        return [taken]
    of_any_batch = (*taken.numbers[:_BATCH], 0, *taken.numbers[_BATCH + 1 :])
    return [Emptied(Workspace("convolution", of_any_batch)), taken]


def is_cudnn_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Sequence[Any], training: bool, eps: float
) -> bool:
    """Return whether cuDNN runs a batch norm (`_select_batch_norm_backend` in ATen/native/Normalization.cpp)."""
    if weight is None or bias is None or torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    wide_enough = input.dtype is not torch.float16 or weight.dtype is torch.float32
    tracks = [statistic is not None for statistic in statistics]
    tracking = all(tracks) or (not any(tracks) and training)
    spatial = input.dim() >= 3 and input.size(0) <= (880_801 if training else 65_535)
    return wide_enough and tracking and spatial and eps >= MIN_EPS and input.numel() < (1 << 31) - 1


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Run `_batch_norm_impl_index` in ATen/native/Normalization.cpp."""
    enabled = cudnn_enabled and torch._C._get_cudnn_enabled()
    if enabled and is_cudnn_batch_norm(input, weight, bias, (running_mean, running_var), training, eps):
        layout = suggest_memory_format(input)
        out, mean, variance, reserve = torch.ops.aten.cudnn_batch_norm(
            input.contiguous(memory_format=layout), weight, bias, running_mean, running_var, training, momentum, eps
        )
        return out, mean, variance, reserve, _CUDNN
    out, mean, variance = torch.ops.aten.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return out, mean, variance, torch.empty(0, dtype=torch.uint8, device=input.device), _NATIVE


def _layer_norm_gradient(call: OperatorCall) -> list[MemoryStep]:
    """Partial sums for weight and bias, which are added up one after the other."""
    tensor, shape, mask = call["input"], call["normalized_shape"], call["output_mask"]
    columns = prod(shape)
    if not columns:
        return []
    numbers = (tensor.numel() // columns, columns, tensor.dtype.itemsize)
    partial_sums, *summed = (Workspace(f"layer_norm_{name}", numbers) for name in ("gradient", "staging", "flags"))
    steps = before_outputs(layout_copies(call["grad_out"], call["grad_output"], tensor))
    count = sum(map(bool, mask[1:]))
    steps += [partial_sums] * count
    for _ in range(count):
        steps += [*summed, Freed(2)]
    return steps


def _group_norm(call: OperatorCall) -> list[MemoryStep]:
    """Two factors for each channel; for half precision maybe also the moments of each group in fp32."""
    tensor = call["input"]
    layout, number_bytes = _group_norm_layout(call), accumulator_bytes(tensor.dtype)
    steps: list[MemoryStep] = [*layout_copies(tensor, memory_format=layout)]
    if tensor.dtype.itemsize < number_bytes and holds("group_norm_moments", call.torch_version):
        steps += [Workspace("group_norm", (call["N"] * call["group"], number_bytes))] * 2
    if layout != torch.contiguous_format or (call["HxW"] > 1 and (call["weight"], call["bias"]) != (None, None)):
        steps += [Workspace("group_norm", (call["N"] * call["C"], number_bytes))] * 2
    return steps


def _group_norm_gradient(call: OperatorCall) -> list[MemoryStep]:
    """Two sums for each channel; for the input's gradient also two factors for each group and one for each channel."""
    layout, number_bytes = _group_norm_layout(call), accumulator_bytes(call["input"].dtype)
    steps = before_outputs(layout_copies(call["grad_out"], call["input"], memory_format=layout))
    channels, groups = (Workspace("group_norm", (call["N"] * call[name], number_bytes)) for name in ("C", "group"))
    plain = layout == torch.contiguous_format
    if call["HxW"] > 1 or not plain:
        steps += [channels] * 2
    if call["output_mask"][0]:
        steps += [groups] * 2
        if plain and call["HxW"] > 1 and call["weight"] is not None:
            steps.append(channels)
    return steps


def _group_norm_layout(call: OperatorCall) -> torch.memory_format:
    reads_it = holds("group_norm_channels_last", call.torch_version)
    return suggest_memory_format(call["input"]) if reads_it else torch.contiguous_format


def _native_batch_norm(call: OperatorCall) -> list[Workspace]:
    """Partial sums of channels-last data (`batch_norm_use_channels_last_kernels` in Normalization.cu).

    Of operators that choose a backend, PyTorch's own kernels run for bf16 and for two dimensions; cuDNN's take next to
    nothing.
    """
    tensor: Tensor = call["input"]
    flag = next((name for name in ("training", "train") if name in call.signature), None)
    runs = tensor.dtype == torch.bfloat16 or tensor.dim() == 2 if flag is None else call[flag]
    layout = _CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    if not (runs and tensor.shape[1] and tensor.is_contiguous(memory_format=layout) and tensor.stride(1) == 1):
        return []
    sums_bytes = _FORWARD_SUMS_BYTES if call["grad_out"] is None else _BACKWARD_SUMS_BYTES
    return [Workspace("batch_norm", (tensor.numel() // tensor.shape[1], tensor.shape[1], sums_bytes))]


def _cudnn_batch_norm(call: OperatorCall) -> list[Workspace]:
    """Forward in training, and backward, which exists only for training; autograd lays out its inputs."""
    tensor: Tensor = call["input"]
    if "training" in call.signature and not call["training"]:
        return []
    if suggest_memory_format(tensor) == torch.contiguous_format:
        return []
    backward = int("training" not in call.signature)
    return [Workspace("cudnn_batch_norm", (tensor.numel(), tensor.shape[1], tensor.dtype.itemsize, backward))]


def _channel_sums(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return empty tensors of the channels, in fp32 for half precision, as sums are (`Normalization.cu`)."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tuple(tensor.new_empty(tensor.shape[1], dtype=dtype) for _ in range(count))


KERNELS: Mapping[str, Callable[..., Any]] = {"_batch_norm_impl_index": _batch_norm}
SYNC_BATCHNORM_METAS: Mapping[str, Callable[..., Any]] = {
    "batch_norm_stats": lambda tensor, _: _channel_sums(tensor, 2),
    "batch_norm_gather_stats_with_counts": lambda tensor, *_: _channel_sums(tensor, 2),
    "batch_norm_elemt": lambda tensor, *_: torch.empty_like(tensor),
    "batch_norm_backward_reduce": lambda _, tensor, *__: _channel_sums(tensor, 4),
    "batch_norm_backward_elemt": lambda _, tensor, *__: torch.empty_like(tensor),
}
"""The operators of `nn.SyncBatchNorm`, which have kernels for CUDA alone."""
WEIGHT_NORM_METAS: Mapping[str, Callable[..., Any]] = {
    "_weight_norm_interface_backward": lambda _, weight, scale, *__: (torch.empty_like(weight), torch.empty_like(scale))
}
"""torch has it from 2.10 on."""
WORKSPACES: Mapping[str, Handler] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("addmm", "_addmm_activation"), partial(_product, with_bias=True)),
    "convolution": _convolution,
    "convolution_backward": _convolution_gradient,
    **dict.fromkeys(
        ("native_layer_norm", "_fused_rms_norm"), lambda call: before_outputs(layout_copies(call["input"]))
    ),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_gradient),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_gradient,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), _native_batch_norm),
    **dict.fromkeys(("native_batch_norm_backward", "_batch_norm_with_update"), _native_batch_norm),
    "batch_norm_backward": _native_batch_norm,
    **dict.fromkeys(("cudnn_batch_norm", "cudnn_batch_norm_backward"), _cudnn_batch_norm),
}
