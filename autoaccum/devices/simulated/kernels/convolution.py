"""Convolutions as on a card: channels-last in, channels-last out."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.patches import replaced


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have outputs and gradients of convolutions laid out as cuDNN's; C++ chooses another backend for `meta`."""
    stack.enter_context(replaced(torch._C, "_conv_determine_backend_memory_format", _output_format))


def _output_format(input: Tensor, weight: Tensor, backend: object) -> torch.memory_format:
    return convolution_format(input, weight)


def convolution_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """The format a convolution runs in and returns.

    `cudnn_conv_suggest_memory_format` in `aten/src/ATen/native/ConvUtils.h`: channels last if either operand is.

    Depthwise convolutions run with cuDNN too when they are channels-last (`use_cudnn_depthwise` in `Convolution.cpp`).
    """
    wide = torch.float64 in (tensor.dtype, weight.dtype)
    if wide or not torch._C._get_cudnn_enabled() or weight.dim() not in (4, 5):
        return torch.contiguous_format
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    return last if last in (suggest_memory_format(tensor), suggest_memory_format(weight)) else torch.contiguous_format
