"""Attributes of PyTorch's, exchanged for a time; which PyTorch it is; and hashes of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch

from autoaccum.errors import UsageError

_MISSING = object()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have `owner` carry `value` under `name`, and what it had before at the end.

    Raises:
        UsageError: It has, or inherits, nothing of that name: this PyTorch would go on without being simulated there.
    """
    if not hasattr(owner, name):
        called = getattr(owner, "__name__", owner)
        raise UsageError(
            f"torch {torch.__version__} has no {called}.{name}, which a simulation of a card takes the place of",
            hint="upgrade autoaccum, or install a torch it knows (2.11 to 2.15)",
        )
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class ObjectNumbers:
    """Numbers what it is asked for, in the order in which that happens."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._numbers = count()
        self._taken: frozenset[int] = frozenset()

    def number_of(self, thing: Any) -> int:
        """The number of `thing`, for as long as it lives."""
        key = id(thing)
        known = self._known.get(key)
        if known is None:
            number = next(number for number in self._numbers if number not in self._taken)
            known = self._known[key] = number, weakref.ref(thing, partial(self._forget, key))
        return known[0]

    def restart(self) -> None:
        """Count from 0 again: the order of a set depends on how large the numbers in it are.

        What is still alive keeps its own, which nothing else gets: a cache (`lru_cache`) would compare the two.
        """
        self._numbers = count()
        self._taken = frozenset(number for number, _ in self._known.values())

    def _forget(self, key: int, _: Any) -> None:
        self._known.pop(key, None)


def patch_hashes(numbering: ObjectNumbers, stack: ExitStack) -> None:
    """Have tensors and modules hash by numbers until `stack` is closed; by themselves they do by their addresses.

    Who iterates over a set of them (such as the parameters that do not decay) allocates in its order, which would be
    another one in each process.
    """

    def number_of(thing: Any) -> int:
        return numbering.number_of(thing)

    for kind in (torch.Tensor, torch.nn.Module):
        stack.enter_context(patched(kind, "__hash__", number_of))


CUDNN = {(2, 11): 91_900, (2, 15): 92_600}
"""What the default wheel of a release is built with (its Requires-Dist); between two of them the older one's counts."""


def torch_release() -> tuple[int, int]:
    """The running PyTorch, as (2, 13).

    Where PyTorch must not be imported yet, `devices.environment.read_torch_release` asks for the installed one, and
    refuses those that are too old.
    """
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version() -> int:
    """Of cuDNN, as 91900 for 9.19.0: this build's, or that of the default wheel of this release when it has none."""
    cudnn: Any = getattr(torch._C, "_cudnn", None)
    version = None if cudnn is None else cudnn.getVersionInt()
    if version is not None:
        return int(version)
    release = torch_release()
    return CUDNN[max((known for known in CUDNN if known <= release), default=min(CUDNN))]


def is_strictly_deterministic() -> bool:
    """Return whether determinism is asked for, not only warned about.

    Kernels of attention take the slower way in the first case alone (`attention_backward.cu` and `sdp_utils.cpp` in
    `aten/src/ATen/native/transformers/cuda`).
    """
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
