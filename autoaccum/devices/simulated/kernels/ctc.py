"""The CTC loss as on a card: its table of path probabilities, or cuDNN's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.devices.simulated.catalog import Card


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Replace `ctc_loss`, whose sizes FakeTensorMode cannot tell: they follow from the lengths of targets."""
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        for overload in ("IntList", "Tensor"):
            register(f"ctc_loss.{overload}", _ctc_loss, key)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """`ctc_loss` in `aten/src/ATen/native/LossCTC.cpp`."""
    batched = log_probs.dim() == 3
    data = log_probs if batched else log_probs.unsqueeze(1)
    if _is_cudnn(data, targets, input_lengths, target_lengths, blank):
        losses: Tensor = _CudnnCtc.apply(data)  # type: ignore[no-untyped-call]
    else:
        on_card = targets.to(device=data.device, dtype=torch.long)
        losses = _Ctc.apply(data, _longest(targets, target_lengths))  # type: ignore[no-untyped-call]
        del on_card
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == 1:
        return (losses / losses.new_empty(losses.shape).clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _is_cudnn(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int,
) -> bool:
    """`_use_cudnn_ctc_loss` in `aten/src/ATen/native/cudnn/LossCTC.cpp`: int32 targets in one row on the CPU."""
    if blank != 0 or targets.dim() != 1 or targets.dtype != torch.int32 or targets.device.type != "cpu":
        return False
    if log_probs.dtype != torch.float32 or not torch._C._get_cudnn_enabled():
        return False
    if any(isinstance(lengths, FakeTensor) for lengths in (input_lengths, target_lengths)):
        return False
    full = all(length == log_probs.size(0) for length in _values(input_lengths))
    return full and all(length < 256 for length in _values(target_lengths))


def _longest(targets: Tensor, target_lengths: Tensor | Sequence[int]) -> int:
    """The longest target: what the lengths say, or what fits where they lie on the card."""
    if isinstance(target_lengths, FakeTensor) and targets.dim() == 2:
        return targets.size(1)
    return max(_values(target_lengths), default=0)


def _values(lengths: Tensor | Sequence[int]) -> list[int]:
    values: Any = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    return values if isinstance(values, list) else [values]


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


class _CudnnCtc(torch.autograd.Function):
    """`_cudnn_ctc_loss`: the gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor) -> Tensor:
        losses, gradient = log_probs.new_empty(log_probs.size(1)), torch.empty_like(log_probs)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        product: Tensor = gradient * grads[0][None, :, None]
        return product
