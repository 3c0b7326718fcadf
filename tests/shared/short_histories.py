"""Histories of an allocator in the form that `real_allocator/record_history.py` writes, and their replay."""

from __future__ import annotations

from typing import Any, TypedDict

from autoaccum.devices.simulated.allocator.settings import read_settings
from tests.gpu.history import compare_history

TOTAL_BYTES = 1000 << 20
_STATISTICS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
)


class ShortHistory(TypedDict):
    """`conf` is PYTORCH_CUDA_ALLOC_CONF; an entry is action, address and size; a block address, size and use (0, 1)."""

    conf: str
    entries: list[tuple[str, int, int]]
    blocks: list[list[int]]
    statistics: list[int]


def expand(short: ShortHistory) -> dict[str, Any]:
    """Return the record that `compare_history` takes."""
    states = ("inactive", "active_allocated")
    blocks = [{"address": at, "size": size, "state": states[used]} for at, size, used in short["blocks"]]
    return {
        "entries": [{"action": action, "addr": at, "size": size, "stream": 0} for action, at, size in short["entries"]],
        "segments": [{"blocks": blocks}],
        "statistics": dict(zip(_STATISTICS, short["statistics"], strict=True)),
    }


def replay(short: ShortHistory) -> dict[str, Any]:
    """Return the comparison of one history with its replay."""
    settings = read_settings({"PYTORCH_CUDA_ALLOC_CONF": short["conf"]}).for_card(TOTAL_BYTES)
    return compare_history(expand(short), settings)
