"""Temporary patches of PyTorch's attributes, hashes and optimizers; versions of PyTorch and cuDNN."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autoaccum.errors import UsageError

_MISSING = object()
_Lists: TypeAlias = list[list[Tensor | None]]
_Groups: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[_Lists, list[int]]]
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
CUDNN = {(2, 11): 91_900, (2, 15): 92_600}
"""cuDNN of each release's default wheel (its Requires-Dist); a release in between has that of the older one."""


class patched:  # noqa: N801  # A context manager that is called like a function.
    """Set attribute `name` of `owner` to `value`, and restore the old value at the end.

    Raises:
        UsageError: `owner` has no such attribute, so this version of PyTorch cannot be patched there.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before: Any = _MISSING

    def __enter__(self) -> None:
        if not hasattr(self._owner, self._name):
            owner_name = getattr(self._owner, "__name__", self._owner)
            raise UsageError(
                f"torch {torch.__version__} has no {owner_name}.{self._name}, which the simulated card replaces",
                hint="upgrade autoaccum, or install torch 2.11 to 2.15",
            )
        self._before = vars(self._owner).get(self._name, _MISSING)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        if self._before is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class ObjectNumbers:
    """Numbers objects in the order in which their numbers are first requested."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._numbers = count()
        self._in_use: frozenset[int] = frozenset()

    def number_of(self, thing: Any) -> int:
        """Return the number of `thing`, which stays the same as long as it lives."""
        key = id(thing)
        entry = self._entries.get(key)
        if entry is None:
            number = next(number for number in self._numbers if number not in self._in_use)
            entry = self._entries[key] = number, weakref.ref(thing, partial(self._forget, key))
        return entry[0]

    def restart(self) -> None:
        """Count from 0 again, since the iteration order of a set depends on the size of its hashes.

        Objects that are still alive keep their numbers, and no other object gets one of these: a cache such as
        `lru_cache` may hold both.
        """
        self._numbers = count()
        self._in_use = frozenset(number for number, _ in self._entries.values())

    def _forget(self, key: int, _: Any) -> None:
        self._entries.pop(key, None)


def patch_hashes(numbering: ObjectNumbers, stack: ExitStack) -> None:
    """Hash tensors and modules by number, not by address, until `stack` is closed.

    Code that iterates over a set of them, such as the parameters without weight decay, allocates in the set's order;
    with addresses this order would differ in each process.
    """

    def number_of(thing: Any) -> int:
        return numbering.number_of(thing)

    for kind in (torch.Tensor, torch.nn.Module):
        stack.enter_context(patched(kind, "__hash__", number_of))


def patch_optimizers(library: torch.library.Library, stack: ExitStack) -> None:
    """Let optimizers take lists of fake tensors.

    `torch/optim/optimizer.py` and `torch/utils/_foreach_utils.py` compare the exact type of a tensor, which is
    FakeTensor here, and C++ groups tensors by device, which is `meta` to it.
    """
    register: Any = library.impl
    for module in (optimizer, _foreach_utils):
        known = module._foreach_supported_types
        stack.enter_context(patched(module, "_foreach_supported_types", [*known, FakeTensor]))
    stack.enter_context(patched(torch._C, "_group_tensors_by_device_and_dtype", _group_tensors))
    for name in _fused_without_meta():
        register(name, lambda *_, **__: None, "Meta")


def _fused_without_meta() -> list[str]:
    """Return the names of fused in-place updates that PyTorch cannot run on tensors without values."""
    names = [
        f"{name}.{overload}" if overload != "default" else name
        for name in _FUSED
        for overload in getattr(torch.ops.aten, name).overloads()
        if overload != "out"
    ]
    return [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")]


def _group_tensors(lists: Sequence[Sequence[Tensor | None]], with_indices: bool = False) -> _Groups:
    """Group by device and dtype of the first list's tensors, in their order (ATen/native/ForeachUtils.h)."""
    groups: _Groups = {}
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


def torch_release() -> tuple[int, int]:
    """Return the release of the imported PyTorch, such as (2, 13).

    `devices.device_choice.read_torch_release` reads it without importing PyTorch, and refuses what is too old.
    """
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version() -> int:
    """Return cuDNN's version, 91900 for 9.19.0: this build's, or the default wheel's when this build has none."""
    cudnn: Any = getattr(torch._C, "_cudnn", None)
    version = None if cudnn is None else cudnn.getVersionInt()
    if version is not None:
        return int(version)
    release = torch_release()
    return CUDNN[max((known for known in CUDNN if known <= release), default=min(CUDNN))]


def is_strictly_deterministic() -> bool:
    """Return whether deterministic algorithms are required, rather than only warned about.

    Attention kernels take their slower deterministic path only if they are required (`attention_backward.cu` and
    `sdp_utils.cpp` in `aten/src/ATen/native/transformers/cuda`).
    """
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
