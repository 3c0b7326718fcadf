"""What a batch holds beside a model's outputs, as a loss reads it: targets, weights, advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoaccum.workload.experiments import map_tensors


def exchanged(batch: Any, first: int, total: int, *, counted: bool) -> Any | None:
    """A batch whose samples from the `first` on hold other values of those tensors; None where there are none such.

    Args:
        batch: Of `total` samples.
        first: The samples before it stay as they are.
        total: All.
        counted: Those of integers, and of zeros and ones: classes, lengths and masks, which take another sample's.
            Otherwise those of other floating values, which are moved towards it.
    """
    found = []

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != total or tensor.is_complex() or _is_counted(tensor) != counted:
            return tensor
        others = tensor.roll(1, 0)
        moved = others if counted else _between(tensor, others)
        result = torch.cat([tensor[:first], moved[first:]])
        if not torch.equal(result, tensor):
            found.append(result)
        return result

    result = map_tensors(batch, change)
    return result if found else None


def _between(tensor: Tensor, others: Tensor) -> Tensor:
    share = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.3
    moved = tensor + share.to(tensor) * (others - tensor)
    return torch.where(moved.isfinite(), moved, tensor)


def _is_counted(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all())
