"""State set aside, and put back in place: the same objects, the same values."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class TensorCopy:
    """The values of one tensor.

    Args:
        tensor: The tensor; it is put back even if its `.data` was exchanged meanwhile.
        on_host: Keep the copy in host memory rather than on the tensor's device.
    """

    def __init__(self, tensor: Tensor, *, on_host: bool) -> None:
        self._tensor = tensor
        self._alias = tensor.detach()
        self._values = None
        if not _is_fixed(tensor):
            self._values = self._alias.to("cpu", copy=True) if on_host else self._alias.clone()

    def restore(self) -> Tensor:
        """Put the values back; allocates nothing on the tensor's device."""
        with torch.no_grad():
            if self._values is not None:
                self._alias.copy_(self._values)
            if is_plain_tensor(self._tensor) and not self._tensor.is_set_to(self._alias):
                self._tensor.data = self._alias
        return self._tensor


class StateCopy:
    """A nest of mappings, lists, tuples, sets, deques, optimizers, schedulers and tensors.

    Everything else counts as a value of its own and is put back as the object it was.
    """

    def __init__(self, root: Any, *, on_host: bool) -> None:
        self._on_host = on_host
        self._tensors: list[TensorCopy] = []
        self._mappings: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._seen: dict[int, Any] = {}
        self._copy(root)
        self._seen.clear()

    def restore(self) -> None:
        """Put everything back in place; what was added since is removed."""
        for mapping, content in self._mappings:
            for key in [key for key in mapping if key not in content]:
                del mapping[key]
            mapping.update(content)
        for sequence, items in self._sequences:
            _refill(sequence, items)
        for tensor in self._tensors:
            tensor.restore()

    def _copy(self, node: Any) -> None:
        if id(node) in self._seen:
            return
        self._seen[id(node)] = node
        if isinstance(node, Tensor):
            self._tensors.append(TensorCopy(node, on_host=self._on_host))
        elif isinstance(node, Optimizer | LRScheduler):
            self._copy(vars(node))
        elif isinstance(node, MutableMapping):
            self._mappings.append((node, dict(node)))
            self._copy_all(node.values())
        elif isinstance(node, list | deque | set):
            self._sequences.append((node, list(node)))
            self._copy_all(node)
        elif isinstance(node, tuple):
            self._copy_all(node)

    def _copy_all(self, nodes: Any) -> None:
        for node in nodes:
            self._copy(node)


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether `tensor` is strided and of no subclass of its own, which may lack operators."""
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def _refill(sequence: Any, items: list[Any]) -> None:
    if isinstance(sequence, list):
        sequence[:] = items
        return
    sequence.clear()
    if isinstance(sequence, set):
        sequence.update(items)
    else:
        sequence.extend(items)


def _is_fixed(tensor: Tensor) -> bool:
    """Whether nothing can write to `tensor` in place: torch refuses overlapping and inference tensors."""
    if tensor.is_inference():
        return True
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
