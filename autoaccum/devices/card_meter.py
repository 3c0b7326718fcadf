"""The meter of a card's memory: the limit on PyTorch's allocator, its peaks and its retries."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autoaccum.accumulation.out_of_memory import is_context_dead
from autoaccum.devices.card_memory import CardMemory as CardMemory
from autoaccum.devices.card_memory import check_index, read_nvml_card, report_card
from autoaccum.devices.trial_record import Reading
from autoaccum.errors import NotMeasuredError, UsageError, first_line

_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


class CardMeter:
    """A meter of the memory that this process takes of one card (`devices.cuda` says what counts).

    Args:
        index: The card's index among the visible cards.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        self._retries_before = 0
        self._lapped = (0, 0)

    def open(self) -> None:
        """Make a context on the card, which `cuda` without an index means from then on.

        Raises:
            UsageError: The card is not visible, or the chosen allocator cannot be limited.
            NotMeasuredError: CUDA does not start.
        """
        try:
            names = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
            check_index(self._index, names, os.environ.get("CUDA_VISIBLE_DEVICES"))
            check_allocator(os.environ, torch.cuda.get_allocator_backend())
            torch.cuda.set_device(self._index)
            torch.cuda.synchronize(self._index)
        except RuntimeError as error:
            raise NotMeasuredError(
                f"CUDA does not start on {self.device} ({first_line(error)})",
                hint="nvidia-smi should list the card and a driver that is new enough for this build of PyTorch",
            ) from error

    def begin(self) -> Mapping[str, Any]:
        """Take the baseline; return the report of the card: its memory, and who holds the rest."""
        memory = read_card(self._index)
        report = report_card(memory, read_nvml_card(memory.uuid), own_pid=os.getpid())
        return {"card": dataclasses.asdict(report)}

    def start(self) -> None:
        """Reset the peak to the memory that is held now, and read the allocator's counters."""
        torch.cuda.current_device()  # Starts CUDA if nothing has yet.
        torch.cuda.reset_peak_memory_stats(self._index)
        self._retries_before, self._lapped = self._statistic("num_alloc_retries"), (0, 0)

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Hold the allocator to the budget, which also counts memory left by loading and by earlier jobs."""
        return card_limit(self._index, budget_bytes)

    def lap(self) -> int:
        """Return the peak of the allocator since `start` or the last lap, with what it kept of earlier ones."""
        reading, peak_bytes = self.read(), self._statistic("reserved_bytes.all.peak")
        self._lapped = reading.peak_allocated_bytes or 0, reading.peak_reserved_bytes or 0
        torch.cuda.reset_peak_memory_stats(self._index)
        return peak_bytes

    def read(self) -> Reading:
        """Return the peaks of tensors and of the allocator, and its retries, since `start`.

        A retry (`num_alloc_retries`) is a release of the cache after the driver, or the limit, refused memory. Only
        the allocator is read, so this also works when the context is dead. If other code resets the peak meanwhile,
        an earlier peak is lost.
        """
        retries = self._statistic("num_alloc_retries")
        return Reading(
            peak_allocated_bytes=max(self._statistic("allocated_bytes.all.peak"), self._lapped[0]),
            peak_reserved_bytes=max(self._statistic("reserved_bytes.all.peak"), self._lapped[1]),
            retries=retries - self._retries_before if retries >= self._retries_before else retries,
        )

    def _statistic(self, name: str) -> int:
        return int(torch.cuda.memory_stats(self._index).get(name, 0))

    def rebase(self) -> None:
        """Do nothing: the limit counts every segment of the allocator."""

    def end_job(self) -> None:
        """Do nothing, as `rebase`."""


def check_allocator(environment: Mapping[str, str], backend: str) -> None:
    """Raise UsageError unless the allocator caches and is PyTorch's own, so that it can be limited and measured."""
    if _NO_CACHING in environment or backend != "native":
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
    before = torch.cuda.get_per_process_memory_fraction(index)
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
