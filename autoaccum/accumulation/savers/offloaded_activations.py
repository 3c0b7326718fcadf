"""Keep what autograd saves for backward in host memory, and fetch it ahead of its use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from autoaccum.accumulation.whole_batch.host_storage import HostStorage

_LEAST_BYTES = 1 << 12
"""Smaller tensors stay: a transfer takes longer than it is worth."""


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
