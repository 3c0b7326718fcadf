"""The host's memory, limited and measured within a process that goes on afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoaccum.devices.in_place.heap import trim_heap
from autoaccum.devices.process_memory import (
    ProcessMemory,
    check_data_limit,
    data_limit,
    read_process_memory,
    reset_peak,
)
from autoaccum.devices.reading import Reading
from autoaccum.units import KIB

_COARSE_BYTES = 512 * KIB
"""The kernel adds up resident pages per processor: a peak may be off by as much."""


class InPlaceHostMeter:
    """What this process takes of the host's memory above what it holds already.

    To be used within `tight_heap`. In one process a failed trial may leave its heap in pieces, and nobody can start
    anew. So a trial's limit is what the process holds when it begins, and the room it has: what earlier trials left
    is not taken off. It might use free pieces of theirs on top, which no limit sees; the peak does, since they were
    given back to the kernel and become resident again: what went beyond its room counts as out of memory. What the
    first job left for good (modules, compiled kernels) is taken off, since a fresh process would need it as well.

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
        """RLIMIT_DATA at what is held now, and what of the budget is left beside the live objects."""
        self._room_bytes = max(0, budget_bytes - self._held_bytes - (self._kept_bytes or 0))
        return data_limit(self._before.data_bytes + self._room_bytes)

    def read(self) -> Reading:
        """The peak since `start`, live objects included; None where it could not be reset and was not passed."""
        before, after = self._before, read_process_memory()
        measured = self._resets_peak or after.peak_bytes > before.peak_bytes
        return Reading(
            peak_reserved_bytes=self._held_bytes + after.peak_above(before) if measured else None,
            shared_bytes=max(0, after.shared_bytes - before.shared_bytes),
        )

    def excess(self, reading: Reading) -> int:
        """By how much a trial that ran went beyond its room, in free pieces or in shared memory; 0 when it did not."""
        if reading.peak_reserved_bytes is None:
            return 0
        excess = reading.peak_reserved_bytes - self._held_bytes - self._room_bytes
        return excess if excess > _COARSE_BYTES else 0

    def settle(self) -> int:
        """What the last job did not give back, in resident bytes; that of the first job is remembered."""
        trim_heap()
        now = read_process_memory()
        assert self._base is not None
        kept = max(0, now.anonymous_bytes - self._base.anonymous_bytes)
        if self._kept_bytes is None:
            self._kept_bytes = kept
        return kept
