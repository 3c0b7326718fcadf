"""What a build of PyTorch without CUDA lacks, and a simulation needs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels.release import torch_release
from autoaccum.devices.simulated.patches import replaced

OWN_KERNELS = ("mish_backward", "silu_backward", "_fused_rms_norm")
"""Operators with a kernel of CUDA's and a composite one for the rest (native_functions.yaml): a build that has not the
first takes the second, and with it a handful of temporaries."""
_METAS: Any = torch._meta_registrations
_GROUPED_PRODUCT = _METAS._meta_grouped_mm_common


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have operators stay whole that CUDA has kernels for; none of these is ever called."""
    register: Any = library.impl
    for name in OWN_KERNELS:
        known = f"aten::{name}" in torch._C._dispatch_get_all_op_names()
        if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            register(name, _never_called, "CUDA")
    if torch_release() < (2, 15):
        stack.enter_context(replaced(_METAS, "_meta_grouped_mm_common", _grouped_product))


def _grouped_product(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`_grouped_mm` without values; up to 2.14 that knows bf16 alone, a card fp32 and fp16 too (`GroupedMMUtils.h`)."""
    if mat_a.dtype not in (torch.float32, torch.float16) or mat_b.dtype != mat_a.dtype:
        return _GROUPED_PRODUCT(mat_a, mat_b, *args, **kwargs)
    return _METAS._create_grouped_mm_output_tensor(mat_a, mat_b, kwargs["offs"], None)


def _never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of the simulated card was reached: fake tensors stop before")
