"""Queries to NVIDIA's driver by NVML: how much of a card is used, and by whom. The only file that imports pynvml.

NVML covers the whole machine and needs no context on the card. An answer that is missing (no library, no driver, no
permission in a container, a MIG slice) is a value, never an exception: `NvmlMissing`, or None in a field.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

_PREFIXES = ("GPU-", "MIG-")
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
    """One card, or one MIG slice, at one moment; a field is None if NVML did not answer.

    Attributes:
        uuid: The uuid with its prefix, `GPU-` or `MIG-`.
        driver: The driver's version.
        used_bytes: The memory of all processes; with old drivers also that of the driver.
        mig: Whether the card is divided into slices.
        slice: The name of the slice, if this is one.
        processes: All processes with a context; pids are the machine's, not a container's.
    """

    uuid: str
    driver: str | None
    used_bytes: int | None
    mig: bool | None
    slice: str | None
    processes: tuple[CardProcess, ...] | None


def read_nvml_card(uuid: str) -> Nvml | NvmlMissing:
    """Query the card or slice with this `uuid`, which PyTorch writes without a prefix."""
    names = [uuid] if uuid.startswith(_PREFIXES) else [prefix + uuid for prefix in _PREFIXES]
    missing = NvmlMissing("no uuid")
    with _library() as library:
        if isinstance(library, NvmlMissing):
            return library
        for name in names:
            try:
                return query_card(library, library.nvmlDeviceGetHandleByUUID(name))
            except library.NVMLError as error:
                missing = NvmlMissing(f"no card {name}: {error}")
    return missing


def read_all_cards() -> tuple[Nvml, ...] | NvmlMissing:
    """Query every card of the machine; slices are not listed."""
    with _library() as library:
        if isinstance(library, NvmlMissing):
            return library
        cards = []
        for index in range(_answer(library, library.nvmlDeviceGetCount) or 0):
            handle = _answer(library, library.nvmlDeviceGetHandleByIndex, index)
            cards += [] if handle is None else [query_card(library, handle)]
        return tuple(cards)


def query_card(library: Any, handle: Any) -> Nvml:
    """Return the record of one card, as far as `library` (pynvml) answers."""
    memory = _answer(library, library.nvmlDeviceGetMemoryInfo, handle, version=library.nvmlMemory_v2)
    is_slice = bool(_answer(library, library.nvmlDeviceIsMigDeviceHandle, handle))
    mig_mode = _answer(library, library.nvmlDeviceGetMigMode, handle)
    computing = _answer(library, library.nvmlDeviceGetComputeRunningProcesses, handle)
    drawing = _answer(library, library.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    found: dict[int, CardProcess] = {}
    for process in [*(computing or ()), *drawing]:  # A process of both kinds counts once.
        found.setdefault(process.pid, CardProcess(pid=process.pid, used_bytes=_number(process, "usedGpuMemory")))
    return Nvml(
        uuid=_answer(library, library.nvmlDeviceGetUUID, handle) or "",
        driver=_answer(library, library.nvmlSystemGetDriverVersion),
        used_bytes=_number(memory, "used"),
        mig=True if is_slice else None if mig_mode is None else bool(mig_mode[0]),
        slice=_answer(library, library.nvmlDeviceGetName, handle) if is_slice else None,
        processes=None if computing is None else tuple(found.values()),
    )


def _number(struct: Any, field: str) -> int | None:
    value = getattr(struct, field, None)
    return None if value is None or value == _NOT_AVAILABLE else int(value)


def _answer(library: Any, query: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return query(*arguments, **options)
    except (library.NVMLError, library.NVMLLibraryMismatchError):
        return None


@contextmanager
def _library() -> Iterator[Any]:
    """Yield pynvml, initialised, or NvmlMissing."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        yield NvmlMissing(f"pynvml (nvidia-ml-py) cannot be imported: {error}")
        return
    try:
        library.nvmlInit()
    except (library.NVMLError, library.NVMLLibraryMismatchError) as error:
        yield NvmlMissing(str(error))
        return
    try:
        yield library
    finally:
        with suppress(library.NVMLError):
            library.nvmlShutdown()
