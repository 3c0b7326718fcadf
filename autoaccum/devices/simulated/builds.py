"""What a build of PyTorch without CUDA lacks, and a simulation needs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from autoaccum.devices.simulated.catalog import Card

OWN_KERNELS = ("mish_backward", "silu_backward", "_fused_rms_norm")
"""Operators with a kernel of CUDA's and a composite one for the rest (native_functions.yaml): a build that has not the
first takes the second, and with it a handful of temporaries."""


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have operators stay whole that CUDA has kernels for; none of these is ever called."""
    register: Any = library.impl
    for name in OWN_KERNELS:
        known = f"aten::{name}" in torch._C._dispatch_get_all_op_names()
        if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            register(name, _never_called, "CUDA")


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of the simulated card was reached: fake tensors stop before")
