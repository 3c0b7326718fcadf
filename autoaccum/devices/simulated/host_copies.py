"""What small tensors held on the host when they were put on the card: what a loss divides by is counted from that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_MOST_ELEMENTS = 1 << 17
"""A weight for each word of a large vocabulary."""

_HELD = "_autoaccum_host_copy"


def remember_host(moved: Tensor, origin: Tensor) -> None:
    """Keep what `origin` on the host holds along with `moved`, its copy on the card."""
    if origin.is_floating_point() and origin.numel() <= _MOST_ELEMENTS and not isinstance(origin, FakeTensor):
        setattr(moved, _HELD, (origin.detach().clone(), moved._version))


def recall_host(tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a copy back to the host holds; None where that is not known: it was computed, or has been written to."""
    values: Tensor | None
    values, version = vars(tensor).get(_HELD, (None, -1)) if isinstance(tensor, FakeTensor) else (None, -1)
    if values is None or tensor._version != version or torch.device(kwargs.get("device") or "cuda").type != "cpu":
        return None
    held: Tensor = values.to(kwargs.get("dtype") or values.dtype, copy=True)
    return held
