"""Histories of an allocator in the form that `real_allocator/record_history.py` writes."""

from __future__ import annotations

from typing import TypedDict

TOTAL_BYTES = 1000 << 20


class ShortHistory(TypedDict):
    """`conf` is PYTORCH_CUDA_ALLOC_CONF; an entry is action, address and size; a block address, size and use (0, 1)."""

    conf: str
    entries: list[tuple[str, int, int]]
    blocks: list[list[int]]
    statistics: list[int]
