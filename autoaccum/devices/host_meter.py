"""The host's memory: RLIMIT_DATA and VmHWM, above what the process held after loading."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from autoaccum.devices.process_memory import (
    ProcessMemory,
    check_data_limit,
    data_limit,
    read_process_memory,
    reset_peak,
)
from autoaccum.devices.reading import Reading


class HostMeter:
    """What this process takes of the host's memory (see `devices.cpu.CpuDevice` for what counts)."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._base: ProcessMemory | None = None
        self._settled: ProcessMemory | None = None
        self._resets_peak = reset_peak()
        self._before = read_process_memory()

    def open(self) -> None:
        """See that the kernel does hold a process to the limit.

        Raises:
            NotMeasuredError: It does not.
        """
        check_data_limit()

    def begin(self) -> Mapping[str, Any]:
        """Whether the peak can be reset; the budget itself is chosen by what the machine has free."""
        self._base = read_process_memory()
        return {"resets_peak": reset_peak()}

    def start(self) -> None:
        """Begin a new VmHWM, where the kernel allows it."""
        self._resets_peak = reset_peak()
        self._before = read_process_memory()

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """RLIMIT_DATA for a job: what the process held after loading, and the budget.

        What the first job left (modules imported late, say) counts, since a fresh process would need it as well; what
        later jobs left besides is made up for: oneDNN reserves 256 KiB for each kernel it compiles and keeps those of
        other sizes. So a used process has up to a few MiB less than a fresh one, never more: what runs in it runs in
        a fresh one, and a size that just did not deserves a fresh one.
        """
        base = self._base or self._before
        others = 0 if self._settled is None else max(0, self._before.data_bytes - self._settled.data_bytes)
        return data_limit(base.data_bytes + others + budget_bytes)

    def read(self) -> Reading:
        """The peak since `start`; None where it could not be reset and was not passed."""
        before, after = self._before, read_process_memory()
        measured = self._resets_peak or after.peak_bytes > before.peak_bytes
        return Reading(
            peak_reserved_bytes=after.peak_above(before) if measured else None,
            shared_bytes=max(0, after.shared_bytes - before.shared_bytes),
        )

    def settle(self) -> int:
        """What the last job did not give back: resident bytes, and of the first job untouched ones as well.

        Those count against the limit of every later job, and nobody makes up for them.
        """
        now = read_process_memory()
        if self._settled is not None:
            return now.anonymous_bytes - self._settled.anonymous_bytes
        before, self._settled = self._base or self._before, now
        return max(now.anonymous_bytes - before.anonymous_bytes, now.data_bytes - before.data_bytes)
