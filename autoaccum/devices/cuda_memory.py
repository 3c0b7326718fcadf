"""The memory of a CUDA card, from within a process that uses it: a reading, a limit on the allocator, its peaks.

Every function here makes a context on the card if this process has none yet. What a context holds itself (some
hundred MiB) is outside of the allocator: it is in none of the limits and peaks below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autoaccum.accumulation.recovery import is_context_dead
from autoaccum.devices.card import CardMemory as CardMemory


def read_card(index: int) -> CardMemory:
    """What card `index` is, and how much of it is free now.

    Raises:
        RuntimeError: As PyTorch raises it: there is no such card, or no driver.
    """
    properties = torch.cuda.get_device_properties(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    uuid = getattr(properties, "uuid", None)
    fraction = torch.cuda.get_per_process_memory_fraction(index)
    return CardMemory(
        index=index,
        name=properties.name,
        total_bytes=properties.total_memory,
        free_bytes=free_bytes,
        reserved_bytes=torch.cuda.memory_reserved(index),
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        uuid=None if uuid is None else str(uuid),
        allowed_bytes=None if fraction >= 1 else int(fraction * properties.total_memory),
    )


@contextmanager
def card_limit(index: int, limit_bytes: int) -> Iterator[None]:
    """Within, PyTorch's allocator holds at most `limit_bytes` of card `index`; what it holds already counts.

    The allocator compares what it has got from the driver, whole segments, with the limit, and raises
    `torch.OutOfMemoryError` where releasing its cache does not help. A lower limit that is set already stays. The
    one from before is set again at the end, unless the context is dead: then nobody can use the card any more.
    """
    before = settable_fraction(torch.cuda.get_per_process_memory_fraction(index))
    _, driver_bytes = torch.cuda.mem_get_info(index)
    # Newer releases take the fraction of the properties' total, older ones of the driver's.
    total_bytes = max(driver_bytes, torch.cuda.get_device_properties(index).total_memory)
    torch.cuda.set_per_process_memory_fraction(min(before, memory_fraction(limit_bytes, total_bytes)), index)
    try:
        yield
    finally:
        try:
            torch.cuda.set_per_process_memory_fraction(before, index)
        except RuntimeError as error:
            if not is_context_dead(error):
                raise


def settable_fraction(told: float) -> float:
    """A fraction that PyTorch told, as one it takes back: cudaMallocAsync without a limit tells 2**64 bytes of a card.

    >>> settable_fraction(2**64 / 24e9)
    1.0
    """
    return min(1.0, told)


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """The share of `total_bytes` that, cut to whole bytes as PyTorch does it, is never more than `limit_bytes`.

    That is `static_cast<size_t>(fraction * static_cast<double>(total))`, setMemoryFraction in
    c10/cuda/CUDACachingAllocator.cpp.

    >>> memory_fraction(12 * 1024**3, 24 * 1024**3)
    0.5
    >>> memory_fraction(2**40, 2**30)
    1.0
    """
    fraction = min(1.0, max(0.0, limit_bytes / total_bytes))
    while int(fraction * float(total_bytes)) > max(0, limit_bytes):
        fraction = math.nextafter(fraction, 0.0)
    return fraction


class CardReading(NamedTuple):
    """What PyTorch's allocator did on a card since a `CardPeak` was started."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    ooms: int


@dataclass(frozen=True)
class CardPeak:
    """A new peak on one card, and how its allocator's counters stood then; made by `start`."""

    index: int
    retries_before: int
    ooms_before: int

    @classmethod
    def start(cls, index: int) -> CardPeak:
        """Begin a new peak on card `index`: what is held now is the least it can be."""
        torch.cuda.current_device()  # Starts CUDA where nothing has yet.
        torch.cuda.reset_peak_memory_stats(index)
        retries, ooms = _counters(torch.cuda.memory_stats(index))
        return cls(index, retries, ooms)

    def read(self) -> CardReading:
        """Peaks of what tensors and of what the allocator held, its retries and its refusals since the start.

        A retry (`num_alloc_retries`) is a release of the cache because the driver, or the limit, said no. This asks
        the allocator only, so it also works when the context is dead. A reset by anyone else meanwhile loses what
        was before it.
        """
        stats = torch.cuda.memory_stats(self.index)
        retries, ooms = _counters(stats)
        return CardReading(
            peak_allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
            peak_reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            retries=_since(self.retries_before, retries),
            ooms=_since(self.ooms_before, ooms),
        )


def _counters(stats: dict[str, Any]) -> tuple[int, int]:
    return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))


def _since(before: int, now: int) -> int:
    """How far a counter came; one that is lower than before was reset meanwhile."""
    return now - before if now >= before else now
