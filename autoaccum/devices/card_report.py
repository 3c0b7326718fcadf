"""Who holds what of a card, from what CUDA and NVML say: a record that travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoaccum.devices.card import CardMemory
from autoaccum.devices.nvml import CardProcess, Nvml, NvmlMissing


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

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CardReport:
        """The report that `dataclasses.asdict` and JSON made a mapping of."""
        fields = dict(record)
        memory = dict(fields.pop("memory"))
        memory["capability"] = tuple(memory["capability"])
        others = fields.pop("others")
        return cls(
            memory=CardMemory(**memory),
            others=None if others is None else tuple(CardProcess(**process) for process in others),
            **fields,
        )


def report_card(
    memory: CardMemory,
    before: Sequence[Nvml] | NvmlMissing,
    now: Nvml | NvmlMissing | None,
    *,
    own_pid: int,
    allocator: str = "native",
) -> CardReport:
    """Put together what is known.

    The own process is the one with `own_pid`; where pids are those of another namespace (containers), the only one
    that has come since `before`. What it holds outside of the allocator is what NVML says it holds, or else by how
    much more of the card is taken than before, less what the allocator holds.

    Args:
        memory: The card, with a context on it.
        before: All cards, before this process made its context.
        now: The card after that; None where PyTorch does not tell which it is.
        own_pid: Of this process.
        allocator: As in `CardReport`.
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
        others=_others(now, earlier, own),
    )


def _own_process(now: Nvml, earlier: Nvml | None, own_pid: int) -> CardProcess | None:
    processes = now.processes or ()
    named = next((process for process in processes if process.pid == own_pid), None)
    if named is not None or earlier is None or earlier.processes is None:
        return named
    known = {process.pid for process in earlier.processes}
    arrived = [process for process in processes if process.pid not in known]
    return arrived[0] if len(arrived) == 1 else None


def _others(now: Nvml, earlier: Nvml | None, own: CardProcess | None) -> tuple[CardProcess, ...] | None:
    """All but the own process; where that is not known, those that were there before it.

    Of a card that is cut into slices, NVML tells the processes of all of them: those on other slices hold nothing here.
    """
    if now.processes is None or (now.mig and now.slice is None):
        return None
    if own is not None:
        return tuple(process for process in now.processes if process != own)
    if earlier is None or earlier.processes is None:
        return None if now.processes else ()
    known = {process.pid for process in earlier.processes}
    return tuple(process for process in now.processes if process.pid in known)


def _context_bytes(memory: CardMemory, earlier: Nvml | None, now: Nvml, own: CardProcess | None) -> int | None:
    if own is not None and own.used_bytes is not None and own.used_bytes > memory.reserved_bytes:
        return own.used_bytes - memory.reserved_bytes
    if earlier is None or earlier.used_bytes is None or now.used_bytes is None:
        return None
    grown = now.used_bytes - earlier.used_bytes - memory.reserved_bytes
    return grown if grown > 0 else None
