"""Keep what autograd saves for backward in host memory, and fetch it ahead of its use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from autoaccum.accumulation.whole_batch.host_storage import HostStorage

_LEAST_BYTES = 1 << 16
"""Smaller tensors stay: a transfer takes longer than it is worth."""


class OffloadedActivations(HostStorage):
    """Copies what is saved to host memory, and fetches each tensor while backward still uses the one before.

    Transfers have a stream of their own on a card. One tensor at most is fetched ahead.
    """

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        super().__init__(kept)
        self._last: ref[Any] | None = None
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
        if tensor.device.type == "cuda":
            torch.cuda.current_stream().wait_stream(self._transfers())
            tensor.record_stream(torch.cuda.current_stream())
        before = None if stored.before is None else stored.before()
        if before is not None:
            self._ahead = before, self._fetch(before)
        return tensor

    def _copy(self, tensor: Tensor, copy: Tensor) -> None:
        if tensor.device.type != "cuda":
            super()._copy(tensor, copy)
            return
        stream = self._transfers()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def _fetch(self, stored: Any) -> Tensor:
        with torch.cuda.stream(self._transfers()) if stored.device.type == "cuda" else nullcontext():
            tensor: Tensor = stored.copy.to(stored.device, non_blocking=True)
        return tensor

    def _transfers(self) -> Any:
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream
