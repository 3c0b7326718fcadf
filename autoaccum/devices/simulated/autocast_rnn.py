"""Autocast of a cuDNN RNN: always fp16, its weights as views of one buffer (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.autocast_casts import OUTSIDE, Casts, eligible

_HALF = torch.float16
"""Whatever the autocast dtype: under bf16 too (*run*: the binaries of 2.11 and 2.15)."""


def rnn_kernel(casts: Casts) -> Callable[..., Any]:
    """The kernel of `_cudnn_rnn` for autocast: the weights are cast at every call, none is kept."""
    operator = torch.ops.aten._cudnn_rnn.default

    def kernel(data: Tensor, weights: list[Tensor], stride: int, flat: Tensor | None, *rest: Any) -> Any:
        hidden, cell, *others = rest
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            told = weights[0] if flat is None else flat
            if told.dtype is not _HALF and eligible(told):
                flat, weights = flatten(weights)
            cell, hidden, data = (casts.cast(value, _HALF) for value in (cell, hidden, data))
            return operator(data, weights, stride, flat, hidden, cell, *others)

    return kernel


def flatten(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A buffer in fp16, and the weights as parts of it (`copy_weights_to_flat_buf_views` in native/cudnn/RNN.cpp).

    Gradients come back through the copies, in the weights' own dtype. cuDNN may pad its buffer by a few bytes.
    """
    with torch.no_grad():
        sizes = [weight.numel() for weight in weights]
        flat = torch.zeros(sum(sizes), dtype=_HALF, device=weights[0].device)
        pieces = torch.split_with_sizes(flat, sizes)
        parts = [piece.view(weight.shape).detach() for piece, weight in zip(pieces, weights, strict=True)]
    return flat, [part.copy_(weight) for part, weight in zip(parts, weights, strict=True)]
