"""The host's memory, limited and measured within a process that goes on afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoaccum.devices.budget import room_above
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.in_place.heap import trim_heap
from autoaccum.devices.process_memory import (
    ProcessMemory,
    check_data_limit,
    data_limit,
    read_process_memory,
    reset_peak,
)
from autoaccum.devices.reading import Reading


class InPlaceHostMeter:
    """What this process takes of the host's memory above what it holds already.

    To be used within `tight_heap`. Whether a trial kept to its budget is told by its peak; RLIMIT_DATA, which would
    refuse at the budget, is set above it (`budget.room_above`). Libraries
    do not survive every refusal (oneDNN's backward of a convolution ends the process by SIGSEGV where a small block
    is refused, seen in 3 of 13 plans with torch 2.13), and this process is the user's. Far above the budget it
    is a large tensor that is refused, which PyTorch answers with an exception.

    A limit counts from what the process holds when a trial begins: what earlier trials left in pieces is not taken
    off, and counts again where it is used again. What the first job left for good (modules, compiled kernels) is
    taken off, since a fresh process would need it as well.

    VmHWM, the kernel's statistic of this process, is reset for each trial: others who read it see that.

    Args:
        held_bytes: What the live objects take of the budget already.
    """

    def __init__(self, held_bytes: int) -> None:
        self.device = torch.device("cpu")
        self._held_bytes = held_bytes
        self._resets_peak = False
        self._base: ProcessMemory | None = None
        self._kept_bytes: int | None = None
        self._before = read_process_memory()
        self._room_bytes = 0

    def open(self) -> None:
        """See that the kernel does hold a process to the limit.

        Raises:
            NotMeasuredError: It does not.
        """
        check_data_limit()

    def begin(self) -> Mapping[str, Any]:
        """Whether the peak can be reset."""
        trim_heap()
        self._base = read_process_memory()
        self._resets_peak = reset_peak()
        return {"resets_peak": self._resets_peak}

    def start(self) -> None:
        """Begin a new VmHWM, where the kernel allows it, with everything set aside already."""
        trim_heap()
        self._resets_peak = reset_peak()
        self._before = read_process_memory()

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """RLIMIT_DATA above what is held now, what of the budget is left beside the live objects, and the slack."""
        self._room_bytes = max(0, budget_bytes - self._held_bytes - (self._kept_bytes or 0))
        slack_bytes = room_above(self._room_bytes, read_host_memory().free_bytes)
        return data_limit(self._before.data_bytes + self._room_bytes + slack_bytes)

    def read(self) -> Reading:
        """The peak since `start`, live objects included; None where it could not be reset and was not passed."""
        before, after = self._before, read_process_memory()
        measured = self._resets_peak or after.peak_bytes > before.peak_bytes
        return Reading(
            peak_reserved_bytes=self._held_bytes + after.peak_above(before) if measured else None,
            shared_bytes=max(0, after.shared_bytes - before.shared_bytes),
        )

    def excess(self, reading: Reading) -> int:
        """By how much a trial went beyond its budget; 0 when it did not."""
        if reading.peak_reserved_bytes is None:
            return 0
        return max(0, reading.peak_reserved_bytes - self._held_bytes - self._room_bytes)

    def settle(self) -> int:
        """What the last job did not give back, in resident bytes; that of the first job is remembered."""
        trim_heap()
        now = read_process_memory()
        assert self._base is not None
        kept = max(0, now.anonymous_bytes - self._base.anonymous_bytes)
        if self._kept_bytes is None:
            self._kept_bytes = kept
        return kept
