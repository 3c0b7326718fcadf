"""Casts of autocast, and those of weights that are kept: `is_eligible` and `cached_cast` of CUDA's autocast.

Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp of torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WIDE = torch.float32
OUTSIDE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
"""Is excluded while a kernel of autocast runs its operator."""
_copy = torch.ops.aten._to_copy.default


def eligible(tensor: Tensor) -> bool:
    """Whether autocast may change the dtype of `tensor`."""
    dtype = tensor.dtype
    return dtype.is_floating_point and dtype is not torch.float64 and tensor.is_cuda


class Casts:
    """Casts arguments, and keeps those of weights until the outermost autocast ends (`cached_cast`).

    What is kept is memory: half a model's bytes. A weight is a leaf in fp32 that requires a gradient and is no view.
    It is cast with gradients on, also within `torch.no_grad`, so that a later use has them (pytorch#158232). So the
    cast has a graph, the graph holds the weight, and its `id` is no other tensor's for as long.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor or a list of tensors in `dtype`, where autocast may change it; anything else as it is."""
        if isinstance(value, list | tuple):
            return [self.cast(item, dtype) for item in value]
        if value is None or value.dtype is dtype or not eligible(value):
            return value
        if dtype is not WIDE and value.requires_grad and value.is_leaf and self._may_keep(value, dtype):
            return self._cast_once(value, dtype)
        return _copy(value, dtype=dtype)

    @staticmethod
    def _may_keep(weight: Tensor, dtype: torch.dtype) -> bool:
        return (
            weight.dtype is WIDE
            and dtype is torch.get_autocast_dtype("cuda")
            and not weight._is_view()
            and torch.is_autocast_cache_enabled()
            and not torch.is_inference_mode_enabled()
        )

    def _cast_once(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        kept = self._kept.get(id(weight))
        if kept is None:
            with torch.enable_grad():
                kept = self._kept[id(weight)] = _copy(weight, dtype=dtype)
        return kept
