"""State set aside, and put back in place: the same objects, the same values."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, deque, set)


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
    """A nest of tensors, optimizers, schedulers and Python's own containers of them.

    Everything else, a library's mapping too, counts as a value of its own and is put back as the object it was.

    Args:
        root: The nest.
        on_host: Keep the copies of tensors in host memory.
    """

    def __init__(self, root: Any, *, on_host: bool = True) -> None:
        self._tensors: list[TensorCopy] = []
        self._mappings: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        seen: dict[int, Any] = {}
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen[id(node)] = node
            if isinstance(node, Tensor):
                self._tensors.append(TensorCopy(node, on_host=on_host))
            elif isinstance(node, Optimizer | LRScheduler):
                waiting.append(vars(node))
            elif type(node) in MAPPINGS:
                self._mappings.append((node, dict(node)))
                waiting.extend(node.values())
            elif type(node) in SEQUENCES:
                self._sequences.append((node, list(node)))
                waiting.extend(node)
            elif isinstance(node, tuple):
                waiting.extend(node)

    def restore(self) -> None:
        """Put everything back in place and in order; what was added since is removed."""
        for mapping, content in self._mappings:
            refill(mapping, content)
        for sequence, items in self._sequences:
            sequence.clear()
            (sequence.update if isinstance(sequence, set) else sequence.extend)(items)
        for tensor in self._tensors:
            tensor.restore()


class ModuleState:
    """Buffers (changed, replaced, or added) and train/eval modes of modules.

    Args:
        modules: Each of them, those within others too.
        host_bytes: Buffers beyond this size are copied to host memory, smaller ones on their own device.
    """

    def __init__(self, modules: Iterable[nn.Module], *, host_bytes: int = 0) -> None:
        listed = list(modules)
        self._modes = [(module, module.training) for module in listed]
        # Whether a name is registered without a tensor, or not at all, is told by `_buffers` only.
        self._buffers = [(module._buffers, dict(module._buffers)) for module in listed]
        found = {id(tensor): tensor for _, held in self._buffers for tensor in held.values() if tensor is not None}
        self.buffers = list(found.values())
        self._copies = [TensorCopy(buffer, on_host=tensor_bytes(buffer) > host_bytes) for buffer in self.buffers]

    def restore(self) -> None:
        """Put everything back; allocates nothing on the buffers' devices."""
        for held, before in self._buffers:
            held.clear()
            held.update(before)
        for copy in self._copies:
            copy.restore()
        for module, training in self._modes:
            module.training = training


def refill(mapping: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    """Clear it only where keys or their order changed, so that what watches a mapping sees no more than it must."""
    now = list(mapping)
    if len(now) != len(content) or any(new is not old for new, old in zip(now, content, strict=True)):
        mapping.clear()
    mapping.update(content)


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
