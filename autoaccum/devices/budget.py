"""How much of a device's memory trials may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autoaccum.errors import UsageError
from autoaccum.units import MIB, MemorySize, format_bytes


@dataclass(frozen=True)
class AvailableMemory:
    """Memory there is and memory that is free, in bytes; `bound` says whose, as the subject of `... has free`."""

    total_bytes: int
    free_bytes: int
    bound: str


_LEAST_ROOM_BYTES = 256 * MIB


class DefaultReserve(NamedTuple):
    """What is kept free where nobody says how much: a share of what is free, and at least so many bytes."""

    share: float
    least_bytes: int


HOST_RESERVE = DefaultReserve(0.05, 256 * MIB)
"""So that the kernel does not begin to kill."""

CARD_RESERVE = DefaultReserve(0.02, 256 * MIB)
"""For kernels and libraries that are loaded when first needed: up to 250 MiB outside of PyTorch's allocator."""


def choose_budget(
    supply: AvailableMemory,
    memory: MemorySize | None = None,
    reserve: MemorySize | None = None,
    *,
    default_reserve: DefaultReserve = HOST_RESERVE,
    holders: str = "",
) -> int:
    """The budget in bytes: `memory`, or else what is free, less `reserve`.

    A budget beyond what is free is refused, not tried: on the host the kernel would kill something in the end.

    Args:
        supply: Read with the workload loaded.
        memory: A size, or a share of all there is.
        reserve: Kept free; None: nothing where `memory` is given, else the `default_reserve`.
        default_reserve: See `reserve`.
        holders: Who holds what is not free, as the end of a sentence.

    Raises:
        UsageError: Nothing is left, or `memory` is more than what is free.

    >>> host = AvailableMemory(total_bytes=16 * 1024**3, free_bytes=10 * 1024**3, bound="the machine")
    >>> format_bytes(choose_budget(host))
    '9.5 GiB'
    >>> format_bytes(choose_budget(host, MemorySize(fraction=0.5), MemorySize(bytes=1024**3)))
    '7.0 GiB'
    """
    wanted = supply.free_bytes if memory is None else memory.resolve(supply.total_bytes)
    if reserve is not None:
        kept = reserve.resolve(supply.total_bytes)
    else:
        automatic = max(int(supply.free_bytes * default_reserve.share), default_reserve.least_bytes)
        kept = 0 if memory is not None else automatic
    budget = wanted - kept
    if budget <= 0:
        whole = f"{format_bytes(wanted)} {'that are free' if memory is None else 'of --memory'}"
        raise UsageError(
            f"a reserve of {format_bytes(kept)} leaves nothing of the {whole}{holders if memory is None else ''}",
            hint="lower --reserve, or free some memory",
        )
    if budget > supply.free_bytes:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is more than the {format_bytes(supply.free_bytes)} that"
            f" {supply.bound} has free{holders}",
            hint="lower --memory, leave it away to use what is free, or end other programs",
        )
    return budget


def limit_slack(limit_bytes: int, free_bytes: int) -> int:
    """How far beyond `limit_bytes` a trial may be let, where libraries would not survive a refusal at it.

    Half as much again, or 256 MiB, but never more than half of what else is free.
    """
    spare_bytes = max(0, free_bytes - limit_bytes) // 2
    return min(max(limit_bytes // 2, _LEAST_ROOM_BYTES), spare_bytes)
