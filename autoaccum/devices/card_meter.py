"""A card's memory: the fraction PyTorch's allocator is held to, its peaks and its retries."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoaccum.accumulation.recovery import is_context_dead
from autoaccum.devices.card_memory import CardMemory as CardMemory
from autoaccum.devices.card_memory import check_index, report_card
from autoaccum.devices.nvml import read_all_cards, read_nvml_card
from autoaccum.devices.trial_record import Reading
from autoaccum.errors import NotMeasuredError, UsageError, first_line

_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_LIMITED = ("native", "cudaMallocAsync")


class CardMeter:
    """What this process takes of one card (see `devices.cuda` for what counts).

    Make it before anything here uses CUDA: NVML's look at the cards before the context is what tells its size.

    Args:
        index: Of the card, among those that are visible.
        make_current: Whether `open` takes the card for the one that `cuda` without an index means.
    """

    def __init__(self, index: int, *, make_current: bool = False) -> None:
        self._make_current = make_current
        self.device = torch.device("cuda", index)
        self._index = index
        self._cards_before = read_all_cards()
        self._base_bytes = 0
        self._after_first_job_bytes: int | None = None
        self._peak: CardPeak | None = None

    def open(self) -> None:
        """Make a context on the card.

        Raises:
            UsageError: It is not among the visible ones, or an allocator is chosen that keeps to no limit.
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
        """The card's report: what it is, what is free of it, and who holds the rest."""
        memory = read_card(self._index)
        name = choose_name(memory.uuid, os.environ.get("CUDA_VISIBLE_DEVICES"))
        now = None if name is None else read_nvml_card(name)
        self._base_bytes = memory.reserved_bytes
        report = report_card(
            memory, self._cards_before, now, own_pid=os.getpid(), allocator=torch.cuda.get_allocator_backend()
        )
        return {"card": dataclasses.asdict(report)}

    def start(self) -> None:
        """Begin a new peak; the allocator's counters are read."""
        self._peak = CardPeak.start(self._index)

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Hold the allocator to the budget; what it kept from loading and from earlier jobs counts."""
        return card_limit(self._index, budget_bytes)

    def read(self) -> Reading:
        """Peaks and counters since `start`; also when the context is dead."""
        assert self._peak is not None
        return self._peak.read()

    def measure_leftover(self) -> int:
        """What the allocator could not give back after the last job, in whole segments."""
        now = torch.cuda.memory_reserved(self._index)
        before = self._base_bytes if self._after_first_job_bytes is None else self._after_first_job_bytes
        self._after_first_job_bytes = now if self._after_first_job_bytes is None else self._after_first_job_bytes
        return now - before


def start_error(device: torch.device, error: BaseException) -> NotMeasuredError:
    """What is said where CUDA does not start."""
    return NotMeasuredError(
        f"CUDA does not start on {device} ({first_line(error)})",
        hint="nvidia-smi should list the card and a driver that is new enough for this build of PyTorch",
    )


def choose_name(uuid: str | None, visible: str | None) -> str | None:
    """What NVML is asked for: a slice by the name CUDA_VISIBLE_DEVICES gives it, else the card's uuid.

    CUDA shows a process one MIG slice at most, and what uuid PyTorch tells for it depends on the driver.

    >>> choose_name("ffc79498-8ff3-c2dc-3b0d-fafd804516ae", "MIG-90443af0-2fe6-57fb-86fe-54186d5a6581")
    'MIG-90443af0-2fe6-57fb-86fe-54186d5a6581'
    """
    first = (visible or "").split(",")[0].strip()
    return first if first.startswith("MIG-") else uuid


def check_allocator(environment: Mapping[str, str], backend: str) -> None:
    """Refuse allocators that can neither be limited nor asked.

    Raises:
        UsageError: Caching is off, or another allocator than PyTorch's own is in its place.
    """
    if _NO_CACHING in environment or backend not in _LIMITED:
        seen = f"{_NO_CACHING} is set" if _NO_CACHING in environment else f"the allocator is {backend!r}"
        raise UsageError(
            f"{seen}, so that no limit is kept and no peak told", hint="plan with PyTorch's own allocator, which caches"
        )


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
    # cudaMallocAsync without a limit tells 2**64 bytes of a card, and takes no more than all of it back.
    before = min(1.0, torch.cuda.get_per_process_memory_fraction(index))
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


@dataclass(frozen=True)
class CardPeak:
    """A new peak on one card, and how often its allocator had tried again then; made by `start`."""

    index: int
    retries_before: int

    @classmethod
    def start(cls, index: int) -> CardPeak:
        """Begin a new peak on card `index`: what is held now is the least it can be."""
        torch.cuda.current_device()  # Starts CUDA where nothing has yet.
        torch.cuda.reset_peak_memory_stats(index)
        return cls(index, int(torch.cuda.memory_stats(index).get("num_alloc_retries", 0)))

    def read(self) -> Reading:
        """Peaks of what tensors and of what the allocator held, and its retries since the start.

        A retry (`num_alloc_retries`) is a release of the cache because the driver, or the limit, said no. This asks
        the allocator only, so it also works when the context is dead. A reset by anyone else meanwhile loses what
        was before it.
        """
        stats = torch.cuda.memory_stats(self.index)
        retries = int(stats.get("num_alloc_retries", 0))
        return Reading(
            peak_allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
            peak_reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            retries=retries - self.retries_before if retries >= self.retries_before else retries,
        )
