"""Records of a CUDA card, from PyTorch in a process with a context on it, and from NVML; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoaccum.devices.nvml import CardProcess, Nvml, NvmlMissing
from autoaccum.errors import UsageError


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
        allocator: PyTorch's allocator: `native` or `cudaMallocAsync`.
        driver: The driver's version; None if NVML does not know it.
        nvml_missing: The reason why there is nothing from NVML; None if there is.
        mig: Whether the card is divided into MIG slices; None if NVML does not know it.
        slice: The name of the MIG slice.
        context_bytes: The memory of this process outside of the allocator: its context and CUDA's libraries. None if it
            cannot be separated from that of other processes.
        others: Other processes on the card; None if NVML does not know them.
    """

    memory: CardMemory
    allocator: str = "native"
    driver: str | None = None
    nvml_missing: str | None = None
    mig: bool | None = None
    slice: str | None = None
    context_bytes: int | None = None
    others: tuple[CardProcess, ...] | None = None

    @property
    def used_by_others_bytes(self) -> int | None:
        """The memory of other processes and the driver; None if this process's context is not known."""
        if self.context_bytes is None:
            return None
        return max(0, self.memory.held_outside_bytes - self.context_bytes)


def report_card(
    memory: CardMemory,
    before: Sequence[Nvml] | NvmlMissing,
    now: Nvml | NvmlMissing | None,
    *,
    own_pid: int,
    allocator: str = "native",
) -> CardReport:
    """Make the report of a card from NVML's records: all cards `before` this process made its context, the card `now`.

    This process is the one with `own_pid`; if pids are those of another namespace (containers), the only new one since
    `before`. Its memory outside of the allocator is that in NVML's record of the process, or else the growth of the
    card's used memory since `before`, minus the memory of the allocator.
    """
    if now is None or isinstance(now, NvmlMissing):
        reason = "PyTorch does not tell the card's uuid" if now is None else now.reason
        return CardReport(memory=memory, allocator=allocator, nvml_missing=reason)
    earlier = None if isinstance(before, NvmlMissing) else next((one for one in before if one.uuid == now.uuid), None)
    own = _own_process(now, earlier, own_pid)
    return CardReport(
        memory=memory,
        allocator=allocator,
        driver=now.driver,
        mig=now.mig,
        slice=now.slice,
        context_bytes=_context_bytes(memory, earlier, now, own),
        others=_others(now, own),
    )


def _own_process(now: Nvml, earlier: Nvml | None, own_pid: int) -> CardProcess | None:
    processes = now.processes or ()
    named = next((process for process in processes if process.pid == own_pid), None)
    if named is not None or earlier is None or earlier.processes is None:
        return named
    known = {process.pid for process in earlier.processes}
    arrived = [process for process in processes if process.pid not in known]
    return arrived[0] if len(arrived) == 1 else None


def _others(now: Nvml, own: CardProcess | None) -> tuple[CardProcess, ...] | None:
    """Return all processes but this one; None if this one is not known.

    For a card with MIG slices NVML lists the processes of all slices: those on other slices hold nothing here.
    """
    if now.processes is None or (now.mig and now.slice is None):
        return None
    if own is None:
        return None if now.processes else ()
    return tuple(process for process in now.processes if process != own)


def _context_bytes(memory: CardMemory, earlier: Nvml | None, now: Nvml, own: CardProcess | None) -> int | None:
    if own is not None and own.used_bytes is not None and own.used_bytes > memory.reserved_bytes:
        return own.used_bytes - memory.reserved_bytes
    if earlier is None or earlier.used_bytes is None or now.used_bytes is None:
        return None
    grown = now.used_bytes - earlier.used_bytes - memory.reserved_bytes
    return grown if grown > 0 else None
