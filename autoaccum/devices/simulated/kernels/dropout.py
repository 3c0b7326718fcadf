"""Dropout as on a card: one fused kernel with a mask of a byte per element."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.catalog import Card


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Replace `dropout`, which elsewhere keeps a mask of the input's own dtype (facts 1.4).

    In-place and channel dropout have no fused kernel on CUDA either.
    """
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        register("dropout", _dropout, key)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """`dropout` in `aten/src/ATen/native/Dropout.cpp`."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    out: Tensor = torch.native_dropout(input, p, train)[0]
    return out
