"""Optimizer updates on lists of tensors (foreach, fused), as PyTorch runs them for CUDA tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autoaccum.devices.simulated.operators.workspaces import Handler, OperatorCall, accumulator_bytes
from autoaccum.devices.simulated.torch_patches import patched
from autoaccum.devices.simulated.trace_records import Workspace

Lists: TypeAlias = list[list[Tensor | None]]
Groups: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[Lists, list[int]]]
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_FAST_NORMS = (1, 2, float("inf"))


def install(library: torch.library.Library, stack: ExitStack) -> None:
    """Let optimizers take lists of fake tensors.

    `torch/optim/optimizer.py` and `torch/utils/_foreach_utils.py` compare the exact type of a tensor, which is
    FakeTensor here, and C++ groups tensors by device, which is `meta` to it.
    """
    register: Any = library.impl
    for module in (optimizer, _foreach_utils):
        known = module._foreach_supported_types
        stack.enter_context(patched(module, "_foreach_supported_types", [*known, FakeTensor]))
    stack.enter_context(patched(torch._C, "_group_tensors_by_device_and_dtype", _group))
    for name in _without_meta():
        register(name, lambda *_, **__: None, "Meta")


def _without_meta() -> list[str]:
    """Return the names of fused in-place updates that PyTorch cannot run on tensors without values."""
    names = [
        f"{name}.{overload}" if overload != "default" else name
        for name in _FUSED
        for overload in getattr(torch.ops.aten, name).overloads()
        if overload != "out"
    ]
    return [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")]


def _group(lists: Sequence[Sequence[Tensor | None]], with_indices: bool = False) -> Groups:
    """Group by device and dtype of the first list's tensors, in their order (ATen/native/ForeachUtils.h)."""
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


def _foreach_norm(call: OperatorCall) -> list[Workspace]:
    tensors: Sequence[Tensor] = call["self"]
    if not tensors or call["ord"] not in _FAST_NORMS or len({tensor.dtype for tensor in tensors}) > 1:
        return []
    largest = max(tensor.numel() for tensor in tensors)
    return [Workspace("foreach_norm", (len(tensors), largest, accumulator_bytes(tensors[0].dtype)))]


WORKSPACES: Mapping[str, Handler] = {"_foreach_norm": _foreach_norm}
