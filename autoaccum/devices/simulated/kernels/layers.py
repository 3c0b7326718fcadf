"""Layers, losses and updates as on a card, where PyTorch's C++ decides by a device that it does not see here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.patches import patched

_aten: Any = torch.ops.aten


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Run what is in `_KERNELS` as CUDA does, lay convolutions out as cuDNN does, and take lists of tensors as lists.

    `torch/optim/optimizer.py` and `torch/utils/_foreach_utils.py` ask for the exact type of a tensor, which is
    FakeTensor here, and have C++ group tensors by device, to which it is `meta`. Layer, group and RMS norm have one
    kernel each on CUDA, whose statistics the fake ones match; instance norm is a batch norm.
    """
    register: Any = library.impl
    for name, kernel in _KERNELS.items():
        for key in ("AutogradCUDA", "CUDA"):
            register(name, kernel, key)
    stack.enter_context(patched(torch._C, "_conv_determine_backend_memory_format", _output_format))
    for module in (optimizer, _foreach_utils):
        known = module._foreach_supported_types
        stack.enter_context(patched(module, "_foreach_supported_types", [*known, FakeTensor]))
    stack.enter_context(patched(torch._C, "_group_tensors_by_device_and_dtype", _group))
    for name in _without_meta():
        register(name, lambda *_, **__: None, "Meta")


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


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """`dropout` in `aten/src/ATen/native/Dropout.cpp`: one fused kernel with a mask of a byte per element."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    out: Tensor = torch.native_dropout(input, p, train)[0]
    return out


def _softmax(operator: Any) -> Callable[..., Tensor]:
    """Of fp16 into fp32: on CUDA one kernel, elsewhere and for bf16 a copy first (aten/src/ATen/native/SoftMax.cpp)."""

    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        into_wide = tensor.dtype is torch.float16 and dtype is torch.float32
        out: Tensor = operator(tensor if dtype is None or into_wide else tensor.to(dtype), dim, into_wide)
        return out

    return kernel


MIN_EPS = 0.0
"""`CUDNN_BN_MIN_EPSILON`, since cuDNN 7.5."""


def is_cudnn_batch_norm(
    *,
    dtype: str,
    weight: str | None,
    bias: str | None,
    tracks: tuple[bool, bool],
    shape: tuple[int, ...],
    training: bool,
    eps: float,
    enabled: bool,
) -> bool:
    """`_select_batch_norm_backend` in `aten/src/ATen/native/Normalization.cpp`; else CUDA's own kernels."""
    if not enabled or weight is None or bias is None or "bfloat16" in (dtype, weight):
        return False
    wide_enough = dtype != "float16" or weight == "float32"
    tracking = all(tracks) or (not any(tracks) and training)
    spatial = len(shape) >= 3 and shape[0] <= (880_801 if training else 65_535)
    return wide_enough and tracking and spatial and eps >= MIN_EPS and prod(shape) < (1 << 31) - 1


_CUDNN, _NATIVE = 1, 0


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


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """`ctc_loss` in `aten/src/ATen/native/LossCTC.cpp`; FakeTensorMode cannot tell its sizes, which lengths decide.

    PyTorch's own kernel, also where cuDNN has one: for int32 targets in one row on the CPU.
    """
    batched = log_probs.dim() == 3
    data = log_probs if batched else log_probs.unsqueeze(1)
    on_card = targets.to(device=data.device, dtype=torch.long)
    losses: Tensor = _Ctc.apply(data, _longest(targets, target_lengths))  # type: ignore[no-untyped-call]
    del on_card
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == 1:
        return (losses / losses.new_empty(losses.shape).clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _longest(targets: Tensor, target_lengths: Tensor | Sequence[int]) -> int:
    """The longest target: what the lengths say, or what fits where they lie on the card."""
    if isinstance(target_lengths, FakeTensor) and targets.dim() == 2:
        return targets.size(1)
    lengths: Any = target_lengths.tolist() if isinstance(target_lengths, Tensor) else list(target_lengths)
    return max(lengths, default=0) if isinstance(lengths, list) else int(lengths)


class _Ctc(torch.autograd.Function):
    """`ctc_loss_gpu` and its backward in `aten/src/ATen/native/cuda/LossCTC.cu`."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, longest: int) -> Tensor:
        steps, batch, _ = log_probs.shape
        table = log_probs.new_empty((batch, steps, 2 * longest + 1))
        losses = log_probs.new_empty(batch)
        ctx.save_for_backward(log_probs, losses, table)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_probs, _, table = ctx.saved_tensors
        backwards = torch.empty_like(table)
        gradient = torch.empty_like(log_probs)
        del backwards
        return gradient, None


Lists: TypeAlias = list[list[Tensor | None]]
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
Groups: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[Lists, list[int]]]


def _without_meta() -> list[str]:
    """Fused updates, which happen in place, that have no function for tensors without values."""
    names = [
        f"{name}.{overload}" if overload != "default" else name
        for name in FUSED
        for overload in getattr(torch.ops.aten, name).overloads()
        if overload != "out"
    ]
    return [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")]


def _group(lists: Sequence[Sequence[Tensor | None]], with_indices: bool = False) -> Groups:
    """By the first list's tensors, in their order (`aten/src/ATen/native/ForeachUtils.h`)."""
    groups: Groups = {}
    for index, first in enumerate(lists[0]):
        if first is None:
            raise RuntimeError("the first list of tensors to be grouped has gaps")
        columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for column, tensors in zip(columns, lists, strict=True):
            if tensors:
                column.append(tensors[index])
        if with_indices:
            indices.append(index)
    return groups


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": _softmax(_aten._softmax.default),
    "log_softmax.int": _softmax(_aten._log_softmax.default),
    "_batch_norm_impl_index": _batch_norm,
    "ctc_loss.IntList": _ctc_loss,
    "ctc_loss.Tensor": _ctc_loss,
}
"""Operators of which C++ chooses another kernel, by the device that it does not see."""
