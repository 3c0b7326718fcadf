"""What NVIDIA's driver knows of a card: how much is taken and by whom. The only file that imports pynvml.

NVML counts for the whole machine and needs no context on the card. What it does not tell (no library, no driver, no
permission in a container, a MIG slice) is a value, never an exception: `NvmlMissing`, or None in a field.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

_PREFIXES = ("GPU-", "MIG-")
_NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE of an unsigned long long, as it stands in the struct."""


@dataclass(frozen=True)
class NvmlMissing:
    """NVML, or one answer of it, is not to be had; `reason` says why, in its own words."""

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
        cards: How many cards the driver has, whether or not this process may see them.
        total_bytes: All there is, the driver's own share included.
        free_bytes: Free for anyone.
        used_bytes: Taken by all processes; in old drivers by the driver itself, too.
        reserved_bytes: Taken by the driver and the firmware.
        mig: Whether the card is cut into slices.
        slice: The name of the slice, where this is one.
        processes: All processes with a context; pids as the machine has them, not a container.
    """

    uuid: str
    driver: str | None
    cards: int | None
    total_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    reserved_bytes: int | None
    mig: bool | None
    slice: str | None
    processes: tuple[CardProcess, ...] | None


def read_nvml(uuid: str) -> Nvml | NvmlMissing:
    """What the driver knows of the card with this `uuid`, as PyTorch or NVML writes it."""
    with _library() as library:
        if isinstance(library, NvmlMissing):
            return library
        found = find_card(library, uuid)
        return found if isinstance(found, NvmlMissing) else parse_card(ask_card(library, found))


def read_all_cards() -> tuple[Nvml, ...] | NvmlMissing:
    """Every card of the machine; slices are not listed."""
    with _library() as library:
        if isinstance(library, NvmlMissing):
            return library
        count = _ask(library, library.nvmlDeviceGetCount)
        if isinstance(count, NvmlMissing):
            return count
        handles = [_ask(library, library.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        return tuple(parse_card(ask_card(library, one)) for one in handles if not isinstance(one, NvmlMissing))


def find_card(library: Any, uuid: str) -> Any | NvmlMissing:
    """NVML's handle of a card or slice.

    PyTorch's uuid has no prefix, and may be that of a slice.
    """
    names = [uuid] if uuid.startswith(_PREFIXES) else [prefix + uuid for prefix in _PREFIXES]
    missing = NvmlMissing("no uuid")
    for name in names:
        found = _ask(library, library.nvmlDeviceGetHandleByUUID, name)
        if not isinstance(found, NvmlMissing):
            return found
        missing = NvmlMissing(f"no card {name}: {found.reason}")
    return missing


def ask_card(library: Any, handle: Any) -> dict[str, Any]:
    """Put every question about one card; each answer is what NVML gave, or NvmlMissing."""
    questions: dict[str, Callable[[], Any]] = {
        "uuid": lambda: library.nvmlDeviceGetUUID(handle),
        "name": lambda: library.nvmlDeviceGetName(handle),
        "driver": lambda: library.nvmlSystemGetDriverVersion(),
        "cards": lambda: library.nvmlDeviceGetCount(),
        "memory": lambda: library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2),
        "mig_mode": lambda: library.nvmlDeviceGetMigMode(handle),
        "is_slice": lambda: library.nvmlDeviceIsMigDeviceHandle(handle),
        "compute": lambda: library.nvmlDeviceGetComputeRunningProcesses(handle),
        "graphics": lambda: library.nvmlDeviceGetGraphicsRunningProcesses(handle),
    }
    return {name: _ask(library, question) for name, question in questions.items()}


def parse_card(answers: Mapping[str, Any]) -> Nvml:
    """The record that these answers make (see `ask_card` for their names; one that is not there was not given)."""

    def known(name: str) -> Any:
        answer = answers.get(name)
        return None if isinstance(answer, NvmlMissing) else answer

    memory = known("memory")
    is_slice = bool(known("is_slice"))
    mig_mode = known("mig_mode")
    return Nvml(
        uuid=known("uuid") or "",
        driver=known("driver"),
        cards=known("cards"),
        total_bytes=_number(memory, "total"),
        free_bytes=_number(memory, "free"),
        used_bytes=_number(memory, "used"),
        reserved_bytes=_number(memory, "reserved"),
        mig=True if is_slice else None if mig_mode is None else bool(mig_mode[0]),
        slice=known("name") if is_slice else None,
        processes=_processes(known("compute"), known("graphics")),
    )


def _processes(computing: Any, graphics: Any) -> tuple[CardProcess, ...] | None:
    """Processes that compute, then those that only draw; a process of both kinds once."""
    if computing is None:
        return None
    found: dict[int, CardProcess] = {}
    for process in [*computing, *(graphics or ())]:
        found.setdefault(process.pid, CardProcess(pid=process.pid, used_bytes=_number(process, "usedGpuMemory")))
    return tuple(found.values())


def _number(struct: Any, field: str) -> int | None:
    value = getattr(struct, field, None)
    return None if value is None or value == _NOT_AVAILABLE else int(value)


def _ask(library: Any, question: Callable[..., Any], *arguments: Any) -> Any | NvmlMissing:
    try:
        return question(*arguments)
    except (library.NVMLError, library.NVMLLibraryMismatchError) as error:
        return NvmlMissing(str(error))


@contextmanager
def _library() -> Iterator[Any]:
    """Pynvml, ready to be asked, or NvmlMissing."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        yield NvmlMissing(f"pynvml (nvidia-ml-py) cannot be imported: {error}")
        return
    started = _ask(library, library.nvmlInit)
    if isinstance(started, NvmlMissing):
        yield started
        return
    try:
        yield library
    finally:
        with suppress(library.NVMLError):
            library.nvmlShutdown()
