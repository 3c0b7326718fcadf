"""A card's memory: the fraction PyTorch's allocator is held to, its peaks and its retries."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoaccum.devices.card import check_index
from autoaccum.devices.card_report import report_card
from autoaccum.devices.cuda_memory import CardPeak, card_limit, read_card
from autoaccum.devices.nvml import read_all_cards, read_nvml
from autoaccum.devices.reading import Reading
from autoaccum.errors import NotMeasuredError, UsageError

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
        self._settled_bytes: int | None = None
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
        now = None if name is None else read_nvml(name)
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
        seen = self._peak.read()
        try:
            available = read_card(self._index).available_bytes
        except RuntimeError:  # A dead context: the driver does not answer.
            available = None
        return Reading(
            peak_reserved_bytes=seen.peak_reserved_bytes,
            peak_allocated_bytes=seen.peak_allocated_bytes,
            retries=seen.retries,
            refusals=seen.ooms,
            available_bytes=available,
        )

    def settle(self) -> int:
        """What the allocator could not give back after the last job, in whole segments."""
        now = torch.cuda.memory_reserved(self._index)
        before = self._base_bytes if self._settled_bytes is None else self._settled_bytes
        self._settled_bytes = now if self._settled_bytes is None else self._settled_bytes
        return now - before


def start_error(device: torch.device, error: BaseException) -> NotMeasuredError:
    """What is said where CUDA does not start."""
    return NotMeasuredError(
        f"CUDA does not start on {device} ({(str(error).splitlines() or [type(error).__name__])[0]})",
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
    if _NO_CACHING in environment:
        raise UsageError(
            f"{_NO_CACHING} is set, and without its cache PyTorch's allocator keeps to no limit and tells no peak",
            hint="unset it to plan",
        )
    if backend not in _LIMITED:
        raise UsageError(
            f"the allocator of this process is {backend!r}, which keeps to no limit",
            hint="plan with PyTorch's own allocator",
        )
