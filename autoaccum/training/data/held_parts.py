"""The parts of a window while it is read: each stays what it was, also where data writes to what it gave before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoaccum.accumulation.attributes import batch_versions
from autoaccum.errors import UsageError
from autoaccum.workload import nests

_GUARDED = 4
"""Data that takes turns with as many buffers is seen before it does harm, for copies of as many parts."""

_SAMPLED_BYTES = 1024
_SAMPLED_ROWS = 8


class HeldParts:
    """What is read for one window after the other.

    Data that fills one buffer again for each batch is right in every plain loop, but not here, where the parts of a
    window are all read before the first is used. So the first parts that are ever held at once are copied before the
    next is read, and compared with it. Where data writes to what it gave before, all it gives is copied from then on;
    where it does not, nothing is, and a part that is written to later is refused.

    Args:
        name: What the data is, for messages.
        are_new: Each is known to lie in memory of its own: then nothing is looked at.
    """

    def __init__(self, name: str, *, are_new: bool = False) -> None:
        self._name, self._watches = name, not are_new
        self._copies_all = False
        self._proven = 1
        self._parts: list[Any] = []
        self._marks: list[_Mark] = []
        self._copies: list[Any] = []

    def begin(self) -> None:
        """Begin a window."""
        self._parts, self._marks, self._copies = [], [], []

    def read(self, take: Callable[[], Any]) -> Any:
        """What `take` gives, once the parts so far are safe from it."""
        guards = self._watches and self._proven <= len(self._parts) <= _GUARDED
        if guards:
            self._copies.extend(copied(part) for part in self._parts[len(self._copies) :])
        entry = take()
        if guards and any(map(_was_written, self._parts, self._copies, self._marks)):
            self._parts, self._copies_all, self._watches = self._copies, True, False
        return copied(entry) if self._copies_all else entry

    def add(self, part: Any) -> None:
        """Hold a part, or a piece of one, that was read."""
        self._parts.append(part)
        if self._watches:
            self._marks.append(_mark(part))

    def done(self) -> list[Any]:
        """The window's parts, each as it was read.

        Raises:
            UsageError: One is not, and there is no copy of it.
        """
        parts = self._parts
        if self._watches:
            now = [_mark(part) for part in parts]
            if any(mark.sample != before.sample for mark, before in zip(now, self._marks, strict=True)):
                raise UsageError(
                    f"{self._name} writes to a batch it gave before, which is still to be trained on",
                    hint="yield a new tensor for each batch, or a .clone() of the buffer",
                )
            self._copies_all = now != self._marks
            self._watches = not self._copies_all
            self._proven = max(self._proven, len(parts))
        self.begin()
        return parts


@dataclass(frozen=True)
class _Mark:
    """What tells cheaply that a part was written to.

    Attributes:
        versions: How often its tensors, or others on the same memory, were; NumPy's arrays do not count.
        sample: Some of its bytes.
    """

    versions: list[int]
    sample: list[bytes]


def copied(node: Any) -> Any:
    """A nest whose tensors and arrays share no memory with another."""
    if isinstance(node, Tensor):
        return node.detach().clone().requires_grad_(node.requires_grad)
    if isinstance(node, np.ndarray):
        return node.copy()
    children = nests.children(node)
    return nests.rebuild(node, [copied(child) for _, child in children]) if children else node


def _was_written(part: Any, copy: Any, mark: _Mark) -> bool:
    if batch_versions(part) != mark.versions:
        return True
    pairs = zip_longest(_leaves(part), _leaves(copy))
    return any(left is None or right is None or not _are_same(left, right) for left, right in pairs)


def _are_same(left: Any, right: Any) -> bool:
    mine, theirs = _bytes(left), _bytes(right)
    return mine is None or theirs is None or np.array_equal(mine, theirs)


def _mark(part: Any) -> _Mark:
    return _Mark(batch_versions(part), [_sample(leaf) for leaf in _leaves(part)])


def _leaves(node: Any) -> list[Any]:
    if isinstance(node, Tensor | np.ndarray):
        return [node]
    return [leaf for _, child in nests.children(node) or () for leaf in _leaves(child)]


def _sample(leaf: Any) -> bytes:
    """Bytes from all over a leaf, at odd distances: of numbers that are whole, some bytes are always zero."""
    if leaf.ndim and not _is_contiguous(leaf):
        leaf = leaf[:: max(1, len(leaf) // _SAMPLED_ROWS)]
    found = _bytes(leaf)
    return b"" if found is None else found[:: len(found) // _SAMPLED_BYTES | 1].tobytes()


def _is_contiguous(leaf: Any) -> bool:
    return leaf.is_contiguous() if isinstance(leaf, Tensor) else bool(leaf.flags.c_contiguous)


def _bytes(leaf: Any) -> np.ndarray[Any, Any] | None:
    """The bytes in host memory, without a copy where they lie in a row; None where nothing can be seen."""
    if isinstance(leaf, Tensor):
        if leaf.device.type != "cpu" or leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
            return None
        plain = leaf.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy()
    return None if leaf.dtype.hasobject else np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
