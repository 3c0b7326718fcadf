"""Queries to NVIDIA's driver by NVML: who holds memory of a card. The only file that imports pynvml.

NVML covers the whole machine and needs no context on the card. An answer that is missing (no library, no driver, no
permission in a container) is a value, never an exception: `NvmlMissing`, or None in a field.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE as an unsigned long long."""


@dataclass(frozen=True)
class NvmlMissing:
    """NVML is not available, or does not know the card; `reason` is its own message."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process with a context on the card; `used_bytes` is None if the driver does not know it (WDDM, some vGPUs)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """One card at one moment; a field is None if NVML did not answer.

    Attributes:
        driver: The driver's version.
        processes: All processes with a context; pids are the machine's, not a container's. None for a card that is
            divided into MIG slices, of which NVML lists the processes of all.
    """

    driver: str | None
    processes: tuple[CardProcess, ...] | None


def read_nvml_card(uuid: str | None) -> Nvml | NvmlMissing:
    """Query the card with this `uuid`, which PyTorch writes without a prefix."""
    if uuid is None:
        return NvmlMissing("PyTorch does not tell the card's uuid")
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        return NvmlMissing(f"pynvml (nvidia-ml-py) cannot be imported: {error}")
    try:
        library.nvmlInit()
        try:
            return query_card(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        finally:
            library.nvmlShutdown()
    except (library.NVMLError, library.NVMLLibraryMismatchError) as error:
        return NvmlMissing(str(error))


def query_card(library: Any, handle: Any) -> Nvml:
    """Return the record of one card, as far as `library` (pynvml) answers."""

    def ask(query: Any, *arguments: Any) -> Any:
        try:
            return query(*arguments)
        except (library.NVMLError, library.NVMLLibraryMismatchError):
            return None

    sliced = bool((ask(library.nvmlDeviceGetMigMode, handle) or [0])[0])
    computing = None if sliced else ask(library.nvmlDeviceGetComputeRunningProcesses, handle)
    drawing = ask(library.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    used = {process.pid: process.usedGpuMemory for process in [*(computing or ()), *drawing]}
    return Nvml(
        driver=ask(library.nvmlSystemGetDriverVersion),
        processes=None
        if computing is None
        else tuple(
            CardProcess(pid=pid, used_bytes=None if used_bytes in (None, _NOT_AVAILABLE) else int(used_bytes))
            for pid, used_bytes in used.items()
        ),
    )
