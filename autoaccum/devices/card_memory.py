"""Records of a CUDA card, from PyTorch in a process with a context on it, and from NVML; no torch here.

NVML covers the whole machine and needs no context on the card. An answer that is missing (no library, no driver, no
permission in a container) is a value, never an exception: `NvmlMissing`, or None in a field.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.simulation.cards import Card

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


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A card and its memory, in bytes, at one moment.

    Attributes:
        index: The index among the cards that are visible to this process, as in `cuda:N`.
        name: The name of the model, such as `NVIDIA GeForce RTX 3090`.
        total_bytes: The total memory, which PyTorch's memory fractions are of.
        free_bytes: The memory that the driver has free (cudaMemGetInfo).
        reserved_bytes: The memory that PyTorch's allocator in this process holds.
        capability: Compute capability, such as (8, 6).
        multiprocessors: The number of multiprocessors.
        uuid: The uuid without its prefix; None if PyTorch does not have it.
        allowed_bytes: The limit that the allocator already has (`set_per_process_memory_fraction`, or
            `PYTORCH_ALLOC_CONF=per_process_memory_fraction:...`); None without a limit.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None
    allowed_bytes: int | None = None

    @property
    def available_bytes(self) -> int:
        """The most that PyTorch's allocator in this process can hold: its own memory and the free memory."""
        allowed = self.total_bytes if self.allowed_bytes is None else self.allowed_bytes
        return min(allowed, self.reserved_bytes + self.free_bytes)

    @property
    def held_outside_bytes(self) -> int:
        """The memory of other processes and of this process's context."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


def check_index(index: int, names: Sequence[str], visible: str | None) -> None:
    """Check the index of a card against the `names` of the visible cards, in CUDA's order.

    Raises:
        UsageError: There is no such card.

    >>> check_index(2, ["NVIDIA A100", "NVIDIA T4"], None)
    Traceback (most recent call last):
    autoaccum.errors.UsageError: there is no cuda:2, visible are NVIDIA A100, NVIDIA T4: \
take one of these, from cuda:0 on
    """
    if index < len(names):
        return
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if not names:
        raise UsageError(
            f"there is no cuda:{index}: no card is visible{hidden}",
            hint="nvidia-smi should list it, and the driver be new enough for this build of PyTorch",
        )
    hint = "take one of these, from cuda:0 on" if len(names) > 1 else "take cuda:0"
    raise UsageError(f"there is no cuda:{index}, visible are {', '.join(names)}{hidden}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class CardReport:
    """A card, with a context of this process on it and PyTorch warm.

    Attributes:
        memory: The card and its memory, from PyTorch.
        driver: The driver's version; None if NVML does not know it.
        nvml_missing: The reason why there is nothing from NVML; None if there is.
        context_bytes: The memory of this process outside of the allocator: its context and CUDA's libraries. None if
            NVML does not know this process, as in a container with pids of its own.
        others: Other processes on the card; None if NVML does not know them, or not this one.
    """

    memory: CardMemory
    driver: str | None = None
    nvml_missing: str | None = None
    context_bytes: int | None = None
    others: tuple[CardProcess, ...] | None = None

    @property
    def used_by_others_bytes(self) -> int | None:
        """The memory of other processes and the driver; None if this process's context is not known."""
        if self.context_bytes is None:
            return None
        return max(0, self.memory.held_outside_bytes - self.context_bytes)


def report_card(memory: CardMemory, nvml: Nvml | NvmlMissing, *, own_pid: int) -> CardReport:
    """Make the report of a card from NVML's record of it; this process is the one with `own_pid`."""
    if isinstance(nvml, NvmlMissing):
        return CardReport(memory=memory, nvml_missing=nvml.reason)
    own = next((process for process in nvml.processes or () if process.pid == own_pid), None)
    used_bytes = 0 if own is None else own.used_bytes or 0
    return CardReport(
        memory=memory,
        driver=nvml.driver,
        context_bytes=used_bytes - memory.reserved_bytes if used_bytes > memory.reserved_bytes else None,
        others=None if own is None else tuple(process for process in nvml.processes or () if process != own),
    )


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


def installed_card(memory: CardMemory) -> Card:
    """Return the installed card, to simulate it."""
    return Card(
        name=memory.name,
        title=memory.name,
        total_bytes=memory.total_bytes,
        capability=memory.capability,
        multiprocessors=memory.multiprocessors,
        source=f"cuda:{memory.index} itself",
    )
