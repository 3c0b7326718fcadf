"""What NVML tells of cards: the processes on one, and the driver's version; the only module that knows pynvml.

NVML covers the whole machine and needs no context on the card. An answer that is missing (no library, no driver, no
permission in a container) is None, never an exception.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE as an unsigned long long."""


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process with a context on the card; `used_bytes` is None if the driver does not know it (WDDM, some vGPUs)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class CardAnswers:
    """What NVML answered on one card; None where it did not.

    Attributes:
        driver: The driver's version.
        processes: All processes with a context; pids are the machine's, not a container's. None for a card that is
            divided into MIG slices, of which NVML lists the processes of all.
        missing: The reason why there is nothing from NVML, in its own words; None if there is.
    """

    driver: str | None = None
    processes: tuple[CardProcess, ...] | None = None
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class MachineAnswers:
    """As `CardAnswers`, on the machine: name and bytes of each of its `cards`, visible to CUDA or not."""

    driver: str | None = None
    cards: tuple[tuple[str | None, int | None], ...] = ()
    missing: str | None = None


_Kind = TypeVar("_Kind", CardAnswers, MachineAnswers)


def ask_nvml(uuid: str | None) -> CardAnswers:
    """Ask about the card with this `uuid`, which PyTorch writes without a prefix."""
    if uuid is None:
        return CardAnswers(missing="PyTorch does not tell the card's uuid")
    return _ask(CardAnswers, lambda library: read_answers(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")))


def list_cards() -> MachineAnswers:
    """Ask which cards the machine has."""
    return _ask(MachineAnswers, read_cards)


def _ask(kind: type[_Kind], read: Callable[[Any], _Kind]) -> _Kind:
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        return kind(missing=f"pynvml (nvidia-ml-py) cannot be imported: {error}")
    try:
        library.nvmlInit()
        try:
            return read(library)
        finally:
            library.nvmlShutdown()
    except (library.NVMLError, library.NVMLLibraryMismatchError) as error:
        return kind(missing=str(error))


def _answer(library: Any, query: str, *arguments: Any) -> Any:
    try:
        return getattr(library, query)(*arguments)
    except (library.NVMLError, library.NVMLLibraryMismatchError):
        return None


def read_cards(library: Any) -> MachineAnswers:
    """Return what `library` (pynvml) answers on all cards."""
    cards = []
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        memory = _answer(library, "nvmlDeviceGetMemoryInfo", handle)
        cards.append((_answer(library, "nvmlDeviceGetName", handle), memory and memory.total))
    return MachineAnswers(driver=_answer(library, "nvmlSystemGetDriverVersion"), cards=tuple(cards))


def read_answers(library: Any, handle: Any) -> CardAnswers:
    """Return what `library` (pynvml) answers on one card."""
    driver = _answer(library, "nvmlSystemGetDriverVersion")
    is_sliced = bool((_answer(library, "nvmlDeviceGetMigMode", handle) or [0])[0])
    computing = None if is_sliced else _answer(library, "nvmlDeviceGetComputeRunningProcesses", handle)
    if computing is None:
        return CardAnswers(driver=driver)
    drawing = _answer(library, "nvmlDeviceGetGraphicsRunningProcesses", handle) or ()
    used = {process.pid: process.usedGpuMemory for process in [*computing, *drawing]}
    processes = (
        CardProcess(pid=pid, used_bytes=None if used_bytes in (None, _NOT_AVAILABLE) else int(used_bytes))
        for pid, used_bytes in used.items()
    )
    return CardAnswers(driver=driver, processes=tuple(processes))
