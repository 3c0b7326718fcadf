"""The most memory an update takes, as it can be had at no cost."""

from __future__ import annotations

import resource
import sys

import torch

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class PeakMeter:
    """On a card: what PyTorch's allocator reserved at most since `start`; on the CPU: what the process ever held.

    The kernel's high-water mark of the process could be set back, but only at the cost of walking its pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """An update begins."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read_bytes(self) -> int | None:
        """The peak, or None where it is not known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        if self._device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        return None
