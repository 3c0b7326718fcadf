"""State set aside, and put back in place: the same objects, the same values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_LIBRARIES = ("torch", "numpy", "builtins", "random", "threading", "logging", "weakref", "collections", "functools")
"""Of objects whose classes these define, only what is known here can be put back."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

_DEPTH = 2
"""How deep objects of the user's own classes are looked into: a meter, and what a meter keeps."""


class TensorCopy:
    """The values of one tensor.

    Args:
        tensor: The tensor; it is put back even if its `.data` was exchanged meanwhile.
        on_host: Keep the copy in host memory rather than on the tensor's device.
    """

    def __init__(self, tensor: Tensor, *, on_host: bool) -> None:
        self._tensor = tensor
        self._alias = tensor.detach()
        self._parts = [] if _is_fixed(tensor) else dense_parts(self._alias)
        self._values = [part.to("cpu", copy=True) if on_host else part.clone() for part in self._parts]

    def restore(self) -> Tensor:
        """Put the values back; allocates nothing on the tensor's device."""
        with torch.no_grad():
            for part, values in zip(self._parts, self._values, strict=True):
                part.copy_(values)
            if self._tensor.layout in _COMPRESSED:
                _refill_compressed(self._tensor, self._parts)
            elif self._tensor.layout is torch.sparse_coo or (
                is_plain_tensor(self._tensor) and not self._tensor.is_set_to(self._alias)
            ):
                self._tensor.data = self._alias
        return self._tensor


class StateCopy:
    """A nest of mappings, lists, tuples, sets, deques, arrays, optimizers, schedulers and tensors.

    Everything else counts as a value of its own and is put back as the object it was.

    Args:
        root: The nest.
        on_host: Keep the copies of tensors in host memory.
        inside: Look into modules as well, and into objects of the user's own classes that modules keep.
    """

    def __init__(self, root: Any, *, on_host: bool, inside: bool = False) -> None:
        self._on_host = on_host
        self._inside = inside
        self._tensors: list[TensorCopy] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._mappings: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._seen: dict[int, Any] = {}
        self._waiting = [(root, _DEPTH)]
        while self._waiting:
            self._copy(*self._waiting.pop())
        self._seen.clear()

    def restore(self) -> None:
        """Put everything back in place and in order; what was added since is removed."""
        for mapping, content in self._mappings:
            _refill_mapping(mapping, content)
        for sequence, items in self._sequences:
            _refill(sequence, items)
        for array, values in self._arrays:
            np.copyto(array, values)
        for tensor in self._tensors:
            tensor.restore()

    def _copy(self, node: Any, depth: int) -> None:
        if id(node) in self._seen:
            return
        self._seen[id(node)] = node
        if isinstance(node, Tensor):
            self._tensors.append(TensorCopy(node, on_host=self._on_host))
        elif isinstance(node, np.ndarray):
            if node.flags.writeable:
                self._arrays.append((node, node.copy()))
        elif isinstance(node, Optimizer | LRScheduler) or (self._inside and isinstance(node, nn.Module)):
            self._wait([vars(node)], _DEPTH)
        elif isinstance(node, MutableMapping):
            self._mappings.append((node, dict(node)))
            self._wait(node.values(), depth)
        elif isinstance(node, list | deque | set):
            self._sequences.append((node, list(node)))
            self._wait(node, depth)
        elif isinstance(node, tuple):
            self._wait(node, depth)
        elif self._inside and depth > 0 and is_own_object(node):
            self._wait([vars(node)], depth - 1)

    def _wait(self, nodes: Iterable[Any], depth: int) -> None:
        self._waiting.extend((node, depth) for node in nodes if not isinstance(node, int | float | str | None))


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the values of `tensor`: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the values of `tensor`, and of the indices of a sparse one, which torch does not count."""
    return sum(part.nbytes for part in dense_parts(tensor))


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether `tensor` is strided and of no subclass of its own, which may lack operators."""
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def is_own_object(node: Any) -> bool:
    """Whether `node` is an object of a class of the user's own that keeps its state in attributes."""
    kind = type(node)
    if isinstance(node, type) or callable(node) or not hasattr(node, "__dict__"):
        return False
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _refill_mapping(mapping: MutableMapping[Any, Any], content: dict[Any, Any]) -> None:
    """Cleared only where keys or their order changed, so that what watches a mapping sees no more than it must."""
    now = list(mapping)
    if len(now) != len(content) or any(new is not old for new, old in zip(now, content, strict=True)):
        mapping.clear()
    mapping.update(content)


def _refill(sequence: Any, items: list[Any]) -> None:
    if isinstance(sequence, list):
        sequence[:] = items
        return
    sequence.clear()
    if isinstance(sequence, set):
        sequence.update(items)
    else:
        sequence.extend(items)


def _refill_compressed(tensor: Tensor, parts: list[Tensor]) -> None:
    """Have `tensor` hold `parts` again: `zero_` resizes them, which leaves their memory, and `.data` cannot be set."""
    if tensor._nnz() == parts[-1].shape[0]:
        return
    indices, others, values = parts
    whole = torch.sparse_compressed_tensor(
        indices, others, values, tensor.shape, layout=tensor.layout, check_invariants=False
    )
    tensor.detach().resize_as_sparse_(whole)
    tensor.copy_(whole)


def _is_fixed(tensor: Tensor) -> bool:
    """Whether nothing can write to `tensor` in place: torch refuses overlapping and inference tensors."""
    if tensor.is_inference():
        return True
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
