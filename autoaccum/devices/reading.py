"""What a process says of the memory one job took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The memory a job took of the kind it is limited in; None where that kind does not tell.

    Attributes:
        peak_reserved_bytes: The most that was held, as the limit counts it.
        peak_allocated_bytes: The most that tensors held.
        shared_bytes: How much of it is shared memory, which no limit stops.
        retries: How often the allocator released its cache and tried again.
        refusals: How often it said no all the same.
        available_bytes: What the process could hold at the end, if nobody limited it.
    """

    peak_reserved_bytes: int | None
    peak_allocated_bytes: int | None = None
    shared_bytes: int = 0
    retries: int | None = None
    refusals: int | None = None
    available_bytes: int | None = None
