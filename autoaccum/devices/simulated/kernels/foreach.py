"""Optimizers and gradient clipping over lists of tensors, as they run on a card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.patches import replaced

Lists: TypeAlias = list[list[Tensor | None]]
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
Groups: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[Lists, list[int]]]


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Have lists of fake CUDA parameters taken as lists of CUDA parameters are (facts 1.8).

    `torch/optim/optimizer.py` and `torch/utils/_foreach_utils.py` ask for the exact type of a tensor, which is
    FakeTensor here, and have C++ group tensors by device, to which it is `meta`.
    """
    for module in (optimizer, _foreach_utils):
        known = module._foreach_supported_types
        stack.enter_context(replaced(module, "_foreach_supported_types", [*known, FakeTensor]))
    stack.enter_context(replaced(torch._C, "_group_tensors_by_device_and_dtype", _group))
    register: Any = library.impl
    for name in _without_meta():
        register(name, lambda *_, **__: None, "Meta")


def _without_meta() -> list[str]:
    """Fused updates, which happen in place, that have no function for tensors without values."""
    names = [
        f"{name}.{overload}" if overload != "default" else name
        for name in FUSED
        for overload in getattr(torch.ops.aten, name).overloads()
        if overload != "out"
    ]
    return [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")]


def _group(lists: Sequence[Sequence[Tensor | None]], with_indices: bool = False) -> Groups:
    """By the first list's tensors, in their order (`aten/src/ATen/native/ForeachUtils.h`)."""
    groups: Groups = {}
    for index, first in enumerate(lists[0]):
        if first is None:
            raise RuntimeError("the first list of tensors to be grouped has gaps")
        columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for column, tensors in zip(columns, lists, strict=True):
            if tensors:
                column.append(tensors[index])
        if with_indices:
            indices.append(index)
    return groups
