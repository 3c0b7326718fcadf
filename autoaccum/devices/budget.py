"""Budgets: how much of a device's memory trials may use, and how much time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.units import MIB, MemorySize, format_bytes

HOST_RESERVE = 0.05
"""The share of free memory that is kept without `--reserve`, lest the kernel kill processes for lack of memory."""

CARD_RESERVE = 0.02
"""Of a card: for kernels and libraries that CUDA loads at first use, up to 250 MiB outside of PyTorch's allocator."""

_LEAST_RESERVE_BYTES = 256 * MIB


@dataclass(frozen=True)
class AvailableMemory:
    """The memory of a device or machine, measured with the workload loaded.

    Attributes:
        total_bytes, free_bytes: All of it, and what is free.
        bound: The owner, as the subject of `... has free`.
        reserve: The share of the free memory that is kept by default; at least 256 MiB are.
        holders: The processes that hold the rest, as the end of a sentence.
    """

    total_bytes: int
    free_bytes: int
    bound: str
    reserve: float = HOST_RESERVE
    holders: str = ""


def choose_budget(
    available: AvailableMemory, memory: MemorySize | None = None, reserve: MemorySize | None = None
) -> int:
    """Return the budget in bytes: `memory`, or else the free memory, minus `reserve`.

    A budget above the free memory is refused, not tried: on the host the kernel would end up killing processes.

    Args:
        available: What there is.
        memory: A size, or a share of the total.
        reserve: Kept free; None: nothing if `memory` is given, else the default of `available`.

    Raises:
        UsageError: Nothing is left, or `memory` is more than is free.

    >>> host = AvailableMemory(total_bytes=16 * 1024**3, free_bytes=10 * 1024**3, bound="the machine")
    >>> format_bytes(choose_budget(host))
    '9.5 GiB'
    >>> format_bytes(choose_budget(host, MemorySize(fraction=0.5), MemorySize(bytes=1024**3)))
    '7.0 GiB'
    """
    wanted = available.free_bytes if memory is None else memory.resolve(available.total_bytes)
    if reserve is not None:
        kept = reserve.resolve(available.total_bytes)
    else:
        automatic = max(int(available.free_bytes * available.reserve), _LEAST_RESERVE_BYTES)
        kept = 0 if memory is not None else automatic
    budget = wanted - kept
    if budget <= 0:
        whole = f"that are free{available.holders}" if memory is None else "of --memory"
        raise UsageError(
            f"a reserve of {format_bytes(kept)} leaves nothing of the {format_bytes(wanted)} {whole}",
            hint="lower --reserve, or free some memory",
        )
    if budget > available.free_bytes:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is more than the {format_bytes(available.free_bytes)} that"
            f" {available.bound} has free{available.holders}",
            hint="lower --memory, leave it away to use what is free, or end other programs",
        )
    return budget


class TimeIsOver(BaseException):
    """A deadline has passed. Not an `Exception`, so that no `except Exception` swallows it."""


class Deadline:
    """The end of a time limit; never reached without a limit."""

    def __init__(self, limit_seconds: float | None) -> None:
        self.limit_seconds = limit_seconds
        self._end = None if limit_seconds is None else time.monotonic() + limit_seconds

    @property
    def left_seconds(self) -> float | None:
        """Return the seconds left, always more than 0; None without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)

    @property
    def is_over(self) -> bool:
        """Return whether no time is left."""
        return self._end is not None and time.monotonic() >= self._end

    def check(self, *_: Any) -> None:
        """Raise TimeIsOver if no time is left; also a hook of modules, whose arguments are ignored."""
        if self.is_over:
            raise TimeIsOver
