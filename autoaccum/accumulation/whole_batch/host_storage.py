"""Keep what autograd saves for backward in host memory, as `torch.autograd.graph.save_on_cpu` does, and count it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class _OnHost:
    """A copy in host memory of a tensor of `device`, as it was at `version` of its `storage`."""

    def __init__(self, tensor: Tensor, storage: StorageWeakRef, copy: Tensor) -> None:
        self.device, self.version, self.storage, self.copy = tensor.device, tensor._version, storage, copy

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether the storage of `tensor`, at the address of the copied one, is that one and unchanged."""
        is_alive = not self.storage.expired()  # type: ignore[no-untyped-call]
        return is_alive and self.version == tensor._version


class HostStorage:
    """Copies tensors of a device to host memory, pinned where there is a card, and back.

    Tensors of the CPU stay where they are, and so do those of the model, which are there in any case.

    Attributes:
        stored_bytes: The bytes of all copies made since it was created.
    """

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        self.stored_bytes = 0
        self._copies: WeakValueDictionary[Any, _OnHost] = WeakValueDictionary()
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which what autograd saves is stored."""
        return saved_tensors_hooks(self.store, self.load)

    def store(self, tensor: Tensor) -> Tensor | _OnHost:
        """Return a copy in host memory of a tensor; itself if it stays where it is."""
        if tensor.device.type == "cpu" or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._kept:
            return tensor
        # One layer's output is the next one's input: autograd saves many tensors twice.
        key = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        found = self._copies.get(key)
        if found is None or not found.is_of(tensor):
            pinned = tensor.device.type == "cuda" and torch.get_device_module("cuda").is_initialized()
            copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)  # With its strides, such as channels_last.
            copy.copy_(tensor.detach())
            self.stored_bytes += copy.nbytes
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._copies[key] = found = _OnHost(tensor, weak, copy)
        return found

    @staticmethod
    def load(stored: Tensor | _OnHost) -> Tensor:
        """Return a stored tensor on its device."""
        return stored.copy.to(stored.device, non_blocking=True) if isinstance(stored, _OnHost) else stored
