"""One CUDA card, as PyTorch in a process with a context on it and NVML tell of it: records, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoaccum.devices.nvml import CardProcess, Nvml, NvmlMissing
from autoaccum.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A card and its memory, in bytes, at one moment.

    Attributes:
        index: As in `cuda:N`: among the cards that are visible to this process.
        name: The model's name, such as `NVIDIA GeForce RTX 3090`.
        total_bytes: All there is, as PyTorch takes fractions of it.
        free_bytes: What the driver would still give to anyone (cudaMemGetInfo).
        reserved_bytes: What PyTorch's allocator in this process holds already.
        capability: Compute capability, such as (8, 6).
        multiprocessors: How many there are.
        uuid: Without prefix; None where PyTorch does not tell.
        allowed_bytes: What the allocator is limited to already (`set_per_process_memory_fraction`, or
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
        """The most PyTorch's allocator in this process could hold: what it holds, and what is free."""
        allowed = self.total_bytes if self.allowed_bytes is None else self.allowed_bytes
        return min(allowed, self.reserved_bytes + self.free_bytes)

    @property
    def held_outside_bytes(self) -> int:
        """What is neither free nor this allocator's: other processes, and this one's context."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


def check_index(index: int, names: Sequence[str], visible: str | None) -> None:
    """Refuse an index beyond the visible cards, whose `names` are in CUDA's order.

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
    raise UsageError(
        f"there is no cuda:{index}, visible are {', '.join(names)}{hidden}", hint="take one of these, from cuda:0 on"
    )


@dataclass(frozen=True, kw_only=True)
class CardReport:
    """A card, with a context of this process on it and PyTorch warm.

    Attributes:
        memory: As PyTorch sees it.
        allocator: PyTorch's allocator: `native` or `cudaMallocAsync`.
        driver: The driver's version; None where NVML does not tell.
        nvml_missing: Why NVML does not tell; None when it does.
        mig: Whether the card is cut into slices; None where NVML does not tell.
        slice: The slice's name.
        context_bytes: What this process holds outside of the allocator: its context and CUDA's libraries. None where
            that could not be told apart from what others hold.
        others: Other processes on the card; None where NVML does not tell.
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
        """What is taken by others, the driver included; None where the own context is not known."""
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
    """Put together what is known: all cards `before` this process made its context, and the card `now`.

    The own process is the one with `own_pid`; where pids are those of another namespace (containers), the only one
    that has come since `before`. What it holds outside of the allocator is what NVML says it holds, or else by how
    much more of the card is taken than before, less what the allocator holds.
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
    """All but the own process; None where that is not known.

    Of a card that is cut into slices, NVML tells the processes of all of them: those on other slices hold nothing here.
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
