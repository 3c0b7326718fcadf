"""Convolutions as on a card: the memory format that cuDNN runs in, and the workspaces of its kernels.

The size of cuDNN's workspace is in workspace_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from autoaccum.devices.simulated.operators.reductions import reduction_workspaces
from autoaccum.devices.simulated.operators.workspaces import (
    Handler,
    OperatorCall,
    accumulator_bytes,
    bytes_of,
    layout_copies,
)
from autoaccum.devices.simulated.torch_patches import patched
from autoaccum.devices.simulated.trace_records import Workspace

_cudnn: Any = torch.backends.cudnn


def install(library: torch.library.Library, stack: ExitStack) -> None:
    """Return convolutions of fake CUDA tensors in the memory format that cuDNN chooses."""
    stack.enter_context(patched(torch._C, "_conv_determine_backend_memory_format", convolution_format))


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


def _convolution(call: OperatorCall) -> list[Workspace]:
    tensor, weight = call["input"], call["weight"]
    layout = convolution_format(tensor, weight)
    copies = layout_copies(tensor, weight, memory_format=layout)
    return copies + _workspace(call, bytes_of(tensor) + bytes_of(weight), bytes_of(call.out), layout)


def _convolution_gradient(call: OperatorCall) -> list[Workspace]:
    """One workspace for the gradients of input and weight, which come one after the other; the bias is a sum."""
    grad, tensor, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    layout = convolution_format(tensor, weight)
    workspaces: list[Workspace] = []
    if mask[0] or mask[1]:
        workspaces += layout_copies(grad, tensor, weight, memory_format=layout)
        workspaces += _workspace(call, bytes_of(grad) + bytes_of(weight), bytes_of(tensor), layout)
    if mask[2]:
        dims = (0, *range(2, grad.dim()))
        workspaces += reduction_workspaces(grad, dims, accumulator=accumulator_bytes(grad.dtype))
    return workspaces


def _workspace(call: OperatorCall, read: int, written: int, layout: torch.memory_format) -> list[Workspace]:
    tensor, weight = call["input"], call["weight"]
    channels_last = layout != torch.contiguous_format
    # PyTorch's own kernel may run instead of cuDNN's (`use_cudnn_depthwise` in Convolution.cpp).
    depthwise = call["groups"] > 1 and tensor.shape[1] == call["groups"] and not call["transposed"]
    if depthwise and not channels_last and tensor.dtype != torch.float16:
        return []
    tf32 = _cudnn.conv.fp32_precision != "ieee"
    flags = (int(channels_last), int(tf32), int(torch.backends.cudnn.benchmark))
    return [Workspace("convolution", (read, written, weight.dtype.itemsize, *flags))]


WORKSPACES: Mapping[str, Handler] = {"convolution": _convolution, "convolution_backward": _convolution_gradient}
