"""While a trial is measured, freed memory goes back to the kernel, so that one peak is like the other."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from autoaccum.devices.in_place.heap import tight_heap, trim_heap
from autoaccum.devices.process_memory import read_process_memory
from autoaccum.units import MIB

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")

pytestmark = pytest.mark.skipif(not GLIBC, reason="only glibc has these thresholds")


def held_after(count: int, size_bytes: int) -> int:
    """What freeing every other one of `count` blocks leaves resident, above what the others take."""
    trim_heap()
    before = read_process_memory().anonymous_bytes
    blocks = [torch.ones(size_bytes, dtype=torch.uint8) for _ in range(count)]
    kept = blocks[::2]
    del blocks
    return read_process_memory().anonymous_bytes - before - len(kept) * size_bytes


def test_what_is_freed_is_given_back_at_once() -> None:
    with tight_heap():
        assert held_after(64, MIB) < 4 * MIB


def test_afterwards_the_heap_keeps_what_is_freed() -> None:
    with tight_heap():
        pass
    assert held_after(64, MIB) > 24 * MIB


def test_the_environment_s_thresholds_are_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    with tight_heap():
        pass
    assert held_after(64, MIB) < 4 * MIB
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    with tight_heap():
        pass
