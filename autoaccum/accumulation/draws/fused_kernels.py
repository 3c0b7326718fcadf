"""Kernels that keep their random draws to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_RNNS = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])


@contextmanager
def open_kernels() -> Iterator[None]:
    """On a card, let attention take its math path and RNNs torch's own: their dropout is then an op of its own.

    On the CPU dropout takes these paths anyway (*run*, torch 2.11 to 2.15), and nothing is changed.
    """
    if not torch.get_device_module("cuda").is_initialized():
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), OpenRNNs():
        yield


class OpenRNNs(TorchFunctionMode):
    """RNNs without cuDNN; convolutions keep it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with cuDNN off for RNNs."""
        if getattr(func, "__name__", "") not in _RNNS:
            return func(*args, **(kwargs or {}))
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))
