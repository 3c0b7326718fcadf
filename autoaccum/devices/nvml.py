"""What NVIDIA's driver knows of a card: how much is taken and by whom. The only file that imports pynvml.

NVML counts for the whole machine and needs no context on the card. What it does not tell (no library, no driver, no
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
"""NVML_VALUE_NOT_AVAILABLE of an unsigned long long, as it stands in the struct."""


@dataclass(frozen=True)
class NvmlMissing:
    """NVML is not to be had, or does not know the card; `reason` says why, in its own words."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process with a context on the card; `used_bytes` is None where the driver does not tell (WDDM, some vGPUs)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Nvml:
    """One card, or one MIG slice, at one moment; None in a field: it was not told.

    Attributes:
        uuid: With its prefix, `GPU-` or `MIG-`.
        driver: The driver's version.
        used_bytes: Taken by all processes; in old drivers by the driver itself, too.
        mig: Whether the card is cut into slices.
        slice: The name of the slice, where this is one.
        processes: All processes with a context; pids as the machine has them, not a container.
    """

    uuid: str
    driver: str | None
    used_bytes: int | None
    mig: bool | None
    slice: str | None
    processes: tuple[CardProcess, ...] | None


def read_nvml_card(uuid: str) -> Nvml | NvmlMissing:
    """What the driver knows of the card or slice with this `uuid`; PyTorch writes it without a prefix."""
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
    """Every card of the machine that can be asked; slices are not listed."""
    with _library() as library:
        if isinstance(library, NvmlMissing):
            return library
        cards = []
        for index in range(_told(library, library.nvmlDeviceGetCount) or 0):
            handle = _told(library, library.nvmlDeviceGetHandleByIndex, index)
            cards += [] if handle is None else [query_card(library, handle)]
        return tuple(cards)


def query_card(library: Any, handle: Any) -> Nvml:
    """The record of one card, as far as `library` (pynvml) answers."""
    memory = _told(library, library.nvmlDeviceGetMemoryInfo, handle, version=library.nvmlMemory_v2)
    is_slice = bool(_told(library, library.nvmlDeviceIsMigDeviceHandle, handle))
    mig_mode = _told(library, library.nvmlDeviceGetMigMode, handle)
    computing = _told(library, library.nvmlDeviceGetComputeRunningProcesses, handle)
    drawing = _told(library, library.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
    found: dict[int, CardProcess] = {}
    for process in [*(computing or ()), *drawing]:  # A process of both kinds counts once.
        found.setdefault(process.pid, CardProcess(pid=process.pid, used_bytes=_number(process, "usedGpuMemory")))
    return Nvml(
        uuid=_told(library, library.nvmlDeviceGetUUID, handle) or "",
        driver=_told(library, library.nvmlSystemGetDriverVersion),
        used_bytes=_number(memory, "used"),
        mig=True if is_slice else None if mig_mode is None else bool(mig_mode[0]),
        slice=_told(library, library.nvmlDeviceGetName, handle) if is_slice else None,
        processes=None if computing is None else tuple(found.values()),
    )


def _number(struct: Any, field: str) -> int | None:
    value = getattr(struct, field, None)
    return None if value is None or value == _NOT_AVAILABLE else int(value)


def _told(library: Any, question: Any, *arguments: Any, **options: Any) -> Any:
    """The answer, or None where there is none."""
    try:
        return question(*arguments, **options)
    except (library.NVMLError, library.NVMLLibraryMismatchError):
        return None


@contextmanager
def _library() -> Iterator[Any]:
    """Pynvml, ready to be asked, or NvmlMissing."""
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
