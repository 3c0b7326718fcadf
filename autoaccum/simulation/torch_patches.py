"""Temporary patches of PyTorch's attributes, kernels, hashes and optimizers; the installed PyTorch and cuDNN."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from autoaccum.errors import UsageError
from autoaccum.simulation.releases import CUDNN, Release

_Lists: TypeAlias = list[list[Tensor | None]]
_Groups: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[_Lists, list[int]]]
_MISSING: Any = object()
_PATCHES: list[tuple[Any, str, Any, Any]] = []
"""Those of attributes in this process, in order: the owner, the name, the value before, and the one in its place."""
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set attribute `name` of `owner` to `value` until `stack` is closed.

    Raises:
        UsageError: `owner` has no such attribute, so this version of PyTorch cannot be patched there.
    """
    if not hasattr(owner, name):
        owner_name = getattr(owner, "__name__", owner)
        raise UsageError(
            f"torch {torch.__version__} has no {owner_name}.{name}, which the simulated card replaces",
            hint="upgrade autoaccum, or install torch 2.9 to 2.15",
        )
    made = owner, name, vars(owner).get(name, _MISSING), value
    _PATCHES.append(made)
    stack.callback(_PATCHES.remove, made)
    stack.callback(_set, *made[:3])
    setattr(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@contextmanager
def unpatched() -> Iterator[None]:
    """Undo all patches of attributes for a while."""
    made = tuple(_PATCHES)
    for owner, name, before, _ in reversed(made):
        _set(owner, name, before)
    try:
        yield
    finally:
        for owner, name, _, value in made:
            setattr(owner, name, value)


def register_missing(library: torch.library.Library, kernels: Mapping[str, Callable[..., Any]], key: str) -> None:
    """Register the kernels of operators that this PyTorch has, and for which it has none under a dispatch key."""
    register: Any = library.impl
    for name, kernel in kernels.items():
        is_known = hasattr(torch.ops.aten, name.partition(".")[0])
        if is_known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            register(name, kernel, key)


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
        patch(stack, kind, "__hash__", number_of)


def patch_optimizers(library: torch.library.Library, stack: ExitStack) -> None:
    """Let optimizers take lists of fake tensors.

    `torch/optim/optimizer.py` and `torch/utils/_foreach_utils.py` compare the exact type of a tensor, which is
    FakeTensor here, and C++ groups tensors by device, which is `meta` to it.
    """
    for module in (optimizer, _foreach_utils):
        patch(stack, module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])
    patch(stack, torch._C, "_group_tensors_by_device_and_dtype", _group_tensors)
    overloads = [(name, overload) for name in _FUSED for overload in getattr(torch.ops.aten, name).overloads()]
    in_place = [f"{name}.{overload}".removesuffix(".default") for name, overload in overloads if overload != "out"]
    register_missing(library, dict.fromkeys(in_place, lambda *_, **__: None), "Meta")


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


def torch_release() -> Release:
    """Return the release of the imported PyTorch, such as (2, 13).

    `devices.installed_torch.read_torch_release` reads it without importing PyTorch, and refuses what is too old.
    """
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version(release: Release) -> int:
    """Return cuDNN's version, 91900 for 9.19.0: this build's, else that of the default wheel of `release`."""
    cudnn: Any = getattr(torch._C, "_cudnn", None)
    version = cudnn.getVersionInt() if cudnn is not None and release == torch_release() else None
    if version is not None:
        return int(version)
    return CUDNN[max((listed for listed in CUDNN if listed <= release), default=min(CUDNN))]


def is_strictly_deterministic() -> bool:
    """Return whether deterministic algorithms are required, rather than only warned about.

    Attention kernels take their slower deterministic path only if they are required (`attention_backward.cu` and
    `sdp_utils.cpp` in `aten/src/ATen/native/transformers/cuda`).
    """
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
