"""Softmax of an fp16 tensor into fp32: on CUDA one kernel, elsewhere a copy in fp32 first.

It decides by the C++ device, which is not CUDA here, so it is decided again. fp16 alone: bf16 is copied on CUDA too.
Source: aten/src/ATen/native/SoftMax.cpp, `softmax` and `log_softmax`, the same from torch 2.11 to 2.15 (*run*).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.catalog import Card

_aten: Any = torch.ops.aten


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have `softmax` and `log_softmax` of fake CUDA tensors run what CUDA would, until `library` is destroyed."""
    register: Any = library.impl
    for name, operator in (("softmax.int", _aten._softmax.default), ("log_softmax.int", _aten._log_softmax.default)):
        for key in ("AutogradCUDA", "CUDA"):
            register(name, _kernel(operator), key)


def _kernel(operator: Any) -> Callable[..., Tensor]:
    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        into_wide = tensor.dtype is torch.float16 and dtype is torch.float32
        out: Tensor = operator(tensor if dtype is None or into_wide else tensor.to(dtype), dim, into_wide)
        return out

    return kernel
