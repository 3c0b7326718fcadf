"""Losses, softmax and dropout as on a card: kernels that C++ chooses by device, and workspaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.simulation.operators.operator_call import (
    Handler,
    OperatorCall,
    accumulator_bytes,
    bytes_of,
    layout_copies,
)
from autoaccum.simulation.operators.reductions import reduction_workspaces
from autoaccum.simulation.trace_records import Kept, MemoryStep, OutputAllocated, Workspace

_aten: Any = torch.ops.aten


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Run `dropout` in ATen/native/Dropout.cpp: one fused kernel with a mask of one byte per element."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    out: Tensor = torch.native_dropout(input, p, train)[0]
    return out


def _softmax(operator: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Run softmax as in ATen/native/SoftMax.cpp: on CUDA one kernel from fp16 to fp32; bf16 is copied first."""
    into_wide = tensor.dtype is torch.float16 and dtype is torch.float32
    return operator(tensor if dtype is None or into_wide else tensor.to(dtype), dim, into_wide)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Run `ctc_loss` in ATen/native/LossCTC.cpp with the sizes that follow from the lengths.

    It is always PyTorch's own kernel. cuDNN has one too, for int32 targets in one row on the CPU.
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
    """Return the length of the longest target; if the lengths lie on the card, the most that fits."""
    if isinstance(target_lengths, FakeTensor) and targets.dim() == 2:
        return targets.size(1)
    lengths: Any = target_lengths.tolist() if isinstance(target_lengths, Tensor) else list(target_lengths)
    return max(lengths, default=0) if isinstance(lengths, list) else int(lengths)


class _Ctc(torch.autograd.Function):
    """The memory of `ctc_loss_gpu` and its backward in ATen/native/cuda/LossCTC.cu."""

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


KERNELS: Mapping[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": partial(_softmax, _aten._softmax.default),
    "log_softmax.int": partial(_softmax, _aten._log_softmax.default),
    "ctc_loss.IntList": _ctc_loss,
    "ctc_loss.Tensor": _ctc_loss,
}


def _loss(call: OperatorCall, *, logarithms: bool = False, keeps_elements: bool = False) -> list[MemoryStep]:
    """The loss of each element, before they are reduced.

    With `logarithms`, that of the sigmoid lives at the same time. A loss that `keeps_elements` is made as large as they
    are and then resized (`TORCH_META_FUNC` of `mse_loss` and `smooth_l1_loss` in ATen/native/BinaryOps.cpp).
    """
    tensor, elements = call.first, Workspace("loss_elements", (bytes_of(call.first),))
    steps: list[MemoryStep] = [elements] if logarithms else []
    if call["reduction"] == 0:
        return steps
    if keeps_elements:
        steps.append(Kept(elements, 0))
    return [*steps, elements, *reduction_workspaces(tensor, (), accumulator=accumulator_bytes(tensor.dtype))]


def _softmax_gradient(call: OperatorCall) -> list[Workspace]:
    """The output times its gradient, and contiguous copies of both."""
    grad, output = call["grad_output"], call["output"]
    product = Workspace("softmax_product", (output.numel() * max(grad.dtype.itemsize, output.dtype.itemsize),))
    return [product, *layout_copies(grad), *layout_copies(output)]


WORKSPACES: Mapping[str, Handler] = {
    # The mask before the output (`dropout_cuda` in ATen/native/cuda/Dropout.cu).
    "native_dropout": lambda call: [OutputAllocated(1), OutputAllocated(0)] if call["train"] is not False else [],
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), partial(_loss, keeps_elements=True)),
    **dict.fromkeys(("huber_loss", "binary_cross_entropy"), _loss),
    "binary_cross_entropy_with_logits": partial(_loss, logarithms=True),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_log_softmax_backward_data"),
        lambda call: layout_copies(call["self"], call["grad_output"], call["output"]),
    ),
    "_softmax_backward_data": _softmax_gradient,
    "_ctc_loss_backward": lambda call: [Workspace("ctc_gradient", (bytes_of(call["log_alpha"]),))],
}
