"""Batch norm as on a card: cuDNN's where CUDA takes it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels.normalisation_choice import is_cudnn_batch_norm

_CUDNN, _NATIVE = 1, 0


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Choose by the dtype and the form of the input, not by the device that C++ sees.

    Layer, group and RMS norm have one kernel each on CUDA, whose statistics the fake ones match; instance norm is a
    batch norm; weight norm is chosen in Python, rightly.
    """
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        register("_batch_norm_impl_index", _batch_norm, key)


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
    """`_batch_norm_impl_index` in `aten/src/ATen/native/Normalization.cpp`."""
    if is_cudnn_batch_norm(
        dtype=_name(input) or "",
        weight=_name(weight),
        bias=_name(bias),
        tracks=(running_mean is not None, running_var is not None),
        shape=tuple(input.shape),
        training=training,
        eps=eps,
        enabled=cudnn_enabled and torch._C._get_cudnn_enabled(),
    ):
        layout = torch._prims_common.suggest_memory_format(input)
        out, mean, variance, reserve = torch.ops.aten.cudnn_batch_norm(
            input.contiguous(memory_format=layout), weight, bias, running_mean, running_var, training, momentum, eps
        )
        return out, mean, variance, reserve, _CUDNN
    out, mean, variance = torch.ops.aten.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return out, mean, variance, torch.empty(0, dtype=torch.uint8, device=input.device), _NATIVE


def _name(tensor: Tensor | None) -> str | None:
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")
