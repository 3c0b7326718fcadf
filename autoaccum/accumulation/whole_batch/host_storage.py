"""Keep what autograd saves for backward in host memory, as `torch.autograd.graph.save_on_cpu` does, and count it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _OnHost(NamedTuple):
    """A copy in host memory of a tensor of `device`."""

    copy: Tensor
    device: torch.device


class HostStorage:
    """Copies tensors of a device to host memory, pinned where there is a card, and back.

    Tensors of the CPU stay where they are, and so do those of the model, which are there in any case.

    Attributes:
        stored_bytes: The bytes of all copies made since it was created.
    """

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        self.stored_bytes = 0
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which what autograd saves is stored."""
        return saved_tensors_hooks(self.store, self.load)

    def store(self, tensor: Tensor) -> Tensor | _OnHost:
        """Return a copy in host memory of a tensor; itself if it stays where it is."""
        if tensor.device.type == "cpu" or tensor.layout != torch.strided or self._is_kept(tensor):
            return tensor
        pinned = tensor.device.type == "cuda" and torch.get_device_module("cuda").is_initialized()
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)  # With its strides, such as channels_last.
        copy.copy_(tensor.detach())
        self.stored_bytes += copy.nbytes
        return _OnHost(copy, tensor.device)

    @staticmethod
    def load(stored: Tensor | _OnHost) -> Tensor:
        """Return a stored tensor on its device."""
        return stored.copy.to(stored.device, non_blocking=True) if isinstance(stored, _OnHost) else stored

    def _is_kept(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._kept
