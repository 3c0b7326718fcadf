"""Keep what autograd saves for backward in host memory, as `torch.autograd.graph.save_on_cpu` does, and count it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 1 << 12
"""Smaller tensors are not offloaded: a transfer takes longer than it is worth."""

_LEAST_EMPTIED = 1 << 16
"""The bytes from which on it is worth to free a tensor that waits."""


class _OnHost:
    """A copy in host memory of a tensor of `device`, as it was at `version` of its `storage`."""

    def __init__(self, tensor: Tensor, storage: ref[torch.UntypedStorage], copy: Tensor) -> None:
        self.device, self.version, self.storage, self.copy = tensor.device, tensor._version, storage, copy

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether the storage of `tensor`, at the address of the copied one, is that one and unchanged."""
        return self.storage() is not None and self.version == tensor._version


class _ByteCount:
    """Counts the bytes of copies. What frees them refers to it, and not to a storage, which may hold tensors."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0

    def add(self, change_bytes: int) -> None:
        self.bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)


class HostStorage:
    """Copies tensors of a device to host memory, pinned where there is a card, and back.

    Tensors of the CPU stay where they are, and so do those of the model, which are there in any case.

    Attributes:
        host: The type of the device whose tensors stay.
    """

    host = "cpu"

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        self._count = _ByteCount()
        self._copies: WeakValueDictionary[Any, _OnHost] = WeakValueDictionary()
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which what autograd saves is stored."""
        return saved_tensors_hooks(self.store, self.load)

    def store(self, tensor: Tensor) -> Tensor | _OnHost:
        """Return a copy in host memory of a tensor; itself if it stays where it is."""
        if tensor.device.type == self.host or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._kept:
            return tensor
        # One layer's output is the next one's input: autograd saves many tensors twice.
        key = _key(tensor)
        stored = self._copies.get(key)
        if stored is None or not stored.is_of(tensor):
            pinned = tensor.device.type == "cuda" and torch.get_device_module("cuda").is_initialized()
            copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)  # With its strides, such as channels_last.
            self._copy(tensor.detach(), copy)
            # Not torch's StorageWeakRef: up to 2.9, it keeps the Python object, whose end the simulation waits for.
            self._copies[key] = stored = _OnHost(tensor, ref(storage), copy)
            self._count.add(copy.nbytes)
            finalize(stored, self._count.add, -copy.nbytes).atexit = False
        return stored

    @property
    def peak_bytes(self) -> int:
        """The most bytes of copies at one time."""
        return self._count.peak_bytes

    def _copy(self, tensor: Tensor, copy: Tensor) -> None:
        copy.copy_(tensor)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Free what module calls in progress have as inputs, where a copy is stored, and fill it again at the end.

        Their callers would keep it on the device while a part waits. What something else may read meanwhile stays: a
        tensor that autograd's graph has not made, or whose memory other tensors share.
        """
        emptied = []
        for tensor in _inputs_of_calls() if self._copies else ():
            stored = self._copies.get(_key(tensor))
            if stored is not None and stored.is_of(tensor) and _is_own(tensor, storage := tensor.untyped_storage()):
                emptied.append((tensor, storage, storage.nbytes(), stored.copy))
                storage.resize_(0)
        try:
            yield
        finally:
            for tensor, storage, size, copy in emptied:
                storage.resize_(size)
                tensor.data.copy_(copy, non_blocking=True)  # `data`: the version stays as it was.

    @staticmethod
    def load(stored: Tensor | _OnHost) -> Tensor:
        """Return a stored tensor on its device."""
        return stored.copy.to(stored.device, non_blocking=True) if isinstance(stored, _OnHost) else stored


class OffloadedActivations(HostStorage):
    """Copies what is saved to host memory, and fetches each tensor while backward still uses the one before.

    On a card, transfers have a stream of their own. One tensor at a time stays on the card until its copy is there, and
    one is fetched ahead. Their memory is that of the stream that computes, which waits for the transfer before the
    memory is used again: PyTorch's allocator keeps what another stream takes for that stream alone.
    """

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        super().__init__(kept)
        self._last: ref[Any] | None = None
        self._leaving: Tensor | None = None
        self._ahead: tuple[Any, Tensor] | None = None
        self._stream: Any = None

    def store(self, tensor: Tensor) -> Any:
        """As `HostStorage.store`; small tensors stay."""
        if tensor.nbytes < _LEAST_BYTES:
            return tensor
        stored: Any = super().store(tensor)
        if stored is not tensor and not hasattr(stored, "before"):
            stored.before, self._last = self._last, ref(stored)
        return stored

    def load(self, stored: Any) -> Tensor:  # type: ignore[override]
        """Return a stored tensor on its device, and begin to fetch the one that was stored before it."""
        if isinstance(stored, Tensor):
            return stored
        ahead, self._ahead = self._ahead, None
        tensor = ahead[1] if ahead is not None and ahead[0] is stored else self._fetch(stored)
        self._finish(stored.device)
        before = None if stored.before is None else stored.before()
        if before is not None:
            self._ahead = before, self._fetch(before)
        return tensor

    def _copy(self, tensor: Tensor, copy: Tensor) -> None:
        self._finish(tensor.device)
        self._transfer(tensor, copy)
        self._leaving = tensor

    def _fetch(self, stored: Any) -> Tensor:
        tensor = torch.empty_like(stored.copy, device=stored.device)
        self._transfer(stored.copy, tensor)
        return tensor

    def _transfer(self, source: Tensor, target: Tensor) -> None:
        if source.device.type != "cuda" and target.device.type != "cuda":
            target.copy_(source)
            return
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def _finish(self, device: torch.device) -> None:
        """Let what computes on `device` wait for the transfers so far, so that memory they use can be freed."""
        if device.type == "cuda" and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._leaving = None


def _key(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


def _inputs_of_calls() -> Iterator[Tensor]:
    """Yield the tensors that are inputs of the module calls in progress, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            named = frame.f_locals
            inputs = [*named["args"], *named["kwargs"].values()]
            inputs += [entry for value in inputs if isinstance(value, list | tuple) for entry in value]
            yield from (value for value in inputs if isinstance(value, Tensor) and value.layout == torch.strided)
        frame = frame.f_back


def _is_own(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether `tensor` fills its storage, which is large, and only the graph and its base share it."""
    root = tensor if tensor._base is None else tensor._base
    return (
        root.grad_fn is not None
        and tensor.device.type != "mps"  # Its storages cannot be resized.
        and _LEAST_EMPTIED <= storage.nbytes() == tensor.nbytes
        and torch._debug_has_internal_overlap(tensor) == 0
        and storage.resizable()
        and torch._C._storage_Use_Count(storage._cdata) <= 2 + (root is not tensor)  # `storage` counts, too.
    )
