"""The meter of a card's memory: the limit on PyTorch's allocator, its peaks and its retries."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoaccum.accumulation.out_of_memory import is_context_dead
from autoaccum.devices.card_memory import CardMemory as CardMemory
from autoaccum.devices.card_memory import check_index, report_card
from autoaccum.devices.nvml import read_nvml_card
from autoaccum.devices.trial_record import Reading
from autoaccum.errors import NotMeasuredError, UsageError, first_line

_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_LIMITED = ("native", "cudaMallocAsync")


class CardMeter:
    """A meter of the memory that this process takes of one card (`devices.cuda` says what counts).

    Args:
        index: The card's index among the visible cards.
        make_current: Whether `open` makes the card the one that `cuda` without an index means.
    """

    def __init__(self, index: int, *, make_current: bool = False) -> None:
        self._make_current = make_current
        self.device = torch.device("cuda", index)
        self._index = index
        self._peak: CardPeak | None = None

    def open(self) -> None:
        """Make a context on the card.

        Raises:
            UsageError: The card is not visible, or the chosen allocator cannot be limited.
            NotMeasuredError: CUDA does not start.
        """
        try:
            names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
            check_index(self._index, names, os.environ.get("CUDA_VISIBLE_DEVICES"))
            check_allocator(os.environ, torch.cuda.get_allocator_backend())
            if self._make_current:
                torch.cuda.set_device(self._index)
            torch.cuda.synchronize(self._index)
        except RuntimeError as error:
            raise start_error(self.device, error) from error

    def begin(self) -> Mapping[str, Any]:
        """Take the baseline; return the report of the card: its memory, and who holds the rest."""
        memory, allocator = read_card(self._index), torch.cuda.get_allocator_backend()
        report = report_card(memory, read_nvml_card(memory.uuid), own_pid=os.getpid(), allocator=allocator)
        return {"card": dataclasses.asdict(report)}

    def start(self) -> None:
        """Begin a new measurement of the peak, and read the allocator's counters."""
        self._peak = CardPeak.start(self._index)

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Hold the allocator to the budget, which also counts memory left by loading and by earlier jobs."""
        return card_limit(self._index, budget_bytes)

    def lap(self) -> int | None:
        """Return the peak of the allocator since `start` or the last lap, with what it kept of earlier ones."""
        assert self._peak is not None
        reading, self._peak = self._peak.lap()
        return reading.peak_reserved_bytes

    def read(self) -> Reading:
        """Return peaks and counters since `start`, even if the context is dead."""
        assert self._peak is not None
        return self._peak.read()

    def rebase(self) -> None:
        """Do nothing: the limit counts every segment of the allocator."""

    def end_job(self) -> None:
        """Do nothing, as `rebase`."""


def start_error(device: torch.device, error: BaseException) -> NotMeasuredError:
    """Return the error for CUDA that does not start."""
    return NotMeasuredError(
        f"CUDA does not start on {device} ({first_line(error)})",
        hint="nvidia-smi should list the card and a driver that is new enough for this build of PyTorch",
    )


def check_allocator(environment: Mapping[str, str], backend: str) -> None:
    """Raise UsageError unless the allocator caches and is PyTorch's own, so that it can be limited and measured."""
    if _NO_CACHING in environment or backend not in _LIMITED:
        seen = f"{_NO_CACHING} is set" if _NO_CACHING in environment else f"the allocator is {backend!r}"
        raise UsageError(
            f"{seen}, so that no limit is kept and no peak told", hint="plan with PyTorch's own allocator, which caches"
        )


def read_card(index: int) -> CardMemory:
    """Read the properties and the free memory of card `index`; without card or driver, PyTorch raises RuntimeError."""
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
    """Limit PyTorch's allocator within to `limit_bytes` of card `index`, including the memory it already holds.

    The allocator compares its memory from the driver, whole segments, with the limit, and raises
    `torch.OutOfMemoryError` if releasing its cache is not enough. A lower limit from before stays. The limit from
    before is restored at the end, unless the context is dead: then the process cannot use the card any more.
    """
    # Without a limit, cudaMallocAsync returns a fraction of 2**64 bytes, and it accepts 1.0 at most.
    before = min(1.0, torch.cuda.get_per_process_memory_fraction(index))
    _, driver_bytes = torch.cuda.mem_get_info(index)
    # The fraction is one of the properties' total in newer releases, of the driver's in older ones.
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


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """Return the fraction of `total_bytes` that PyTorch rounds to `limit_bytes` at most.

    PyTorch computes `static_cast<size_t>(fraction * static_cast<double>(total))`, setMemoryFraction in
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


@dataclass(frozen=True)
class CardPeak:
    """A measurement of the peak on one card, with the allocator's retries at its beginning; made by `start`.

    `lapped` are the peaks of tensors and of the allocator before the last lap.
    """

    index: int
    retries_before: int
    lapped: tuple[int, int] = (0, 0)

    @classmethod
    def start(cls, index: int) -> CardPeak:
        """Reset the peak of card `index` to the memory that is held now."""
        torch.cuda.current_device()  # Starts CUDA if nothing has yet.
        torch.cuda.reset_peak_memory_stats(index)
        return cls(index, int(torch.cuda.memory_stats(index).get("num_alloc_retries", 0)))

    def lap(self) -> tuple[Reading, CardPeak]:
        """Return the peaks since the last lap, and a measurement that goes on; the card's own are reset."""
        reading, now = self.read(), dataclasses.replace(self, lapped=(0, 0)).read()
        torch.cuda.reset_peak_memory_stats(self.index)
        peaks = reading.peak_allocated_bytes or 0, reading.peak_reserved_bytes or 0
        return now, dataclasses.replace(self, lapped=peaks)

    def read(self) -> Reading:
        """Return the peaks of tensors and of the allocator, and its retries, since the start.

        A retry (`num_alloc_retries`) is a release of the cache after the driver, or the limit, refused memory. Only
        the allocator is read, so this also works when the context is dead. If other code resets the peak meanwhile,
        an earlier peak is lost.
        """
        stats = torch.cuda.memory_stats(self.index)
        retries = int(stats.get("num_alloc_retries", 0))
        return Reading(
            peak_allocated_bytes=max(int(stats.get("allocated_bytes.all.peak", 0)), self.lapped[0]),
            peak_reserved_bytes=max(int(stats.get("reserved_bytes.all.peak", 0)), self.lapped[1]),
            retries=retries - self.retries_before if retries >= self.retries_before else retries,
        )
