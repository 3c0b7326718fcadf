"""The C library's heap while a trial is measured: what is freed goes back to the kernel at once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from autoaccum.units import KIB, MIB

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)."""

_TIGHT_BYTES = 64 * KIB
_SETTLED = {_MMAP_THRESHOLD: 32 * MIB, _TRIM_THRESHOLD: 64 * MIB}
"""Where glibc moves both by itself once a process has freed a block of 32 MiB; it cannot be asked where they are."""

_VARIABLES = {_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}


@contextmanager
def tight_heap() -> Iterator[None]:
    """Within, blocks from 64 KiB on are mapped and unmapped one by one, as in the children of other devices.

    glibc would keep what tensors leave, in pieces and beyond what `malloc_trim` reaches, and give it to the next
    trial: peaks then differ by tens of MiB and miss what was there already. Afterwards both thresholds are what the
    environment says, or where glibc moves them in any process that frees large tensors. Other C libraries stay alone.
    """
    _set_thresholds(dict.fromkeys(_SETTLED, _TIGHT_BYTES))
    try:
        yield
    finally:
        _set_thresholds({name: _chosen(variable) or _SETTLED[name] for name, variable in _VARIABLES.items()})


def trim_heap() -> None:
    """Give free pages of the heap back to the kernel (malloc_trim(3)), where glibc can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(thresholds: dict[int, int]) -> None:
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            for name, size_bytes in thresholds.items():
                library.mallopt(name, size_bytes)


def _chosen(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None
