"""The CPU: a child process under a real limit on its memory, so that PyTorch's own allocator says no."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from autoaccum.devices.base import Inspection, Trial, TrialSettings
from autoaccum.devices.budget import choose_budget
from autoaccum.devices.host_memory import HostMemory, read_host_memory
from autoaccum.devices.worker import Worker
from autoaccum.errors import NotMeasuredError
from autoaccum.units import MIB, MemorySize

_LEAST_KEPT_BYTES = 2 * MIB
_KEPT_SHARE = 0.01


class CpuDevice:
    """Trials on the CPU of a Linux machine.

    *What counts against the budget* is all private memory a trial asks for after PyTorch was warmed up and the
    workload's module imported: model, batch (the whole share of the rank), gradients, optimizer state, activations,
    scratch of the libraries, modules imported late. Not counted: PyTorch itself, what the module holds from its
    import on (a dataset, a model made there), pages of files, and shared memory (`/dev/shm`, tmpfs: workers of a
    DataLoader hand over their batches there). The limit is RLIMIT_DATA at VmData after loading plus the budget
    (getrlimit(2)), which counts address space, touched or not; swap does not extend it.

    *The peak* (`peak_reserved_bytes`) is what was held at most: VmHWM, reset before the trial, above what was resident
    before it, code of libraries left out and shared memory included; and, since the limit counts it, what was asked
    for and is untouched at the trial's end (oneDNN reserves 256 KiB for every kernel it compiles). The kernel adds up
    resident pages per processor, so it is exact to some hundred KiB; pages that were swapped out are missing. Where
    `/proc/self/clear_refs` cannot be written, every trial has a process of its own. What tensors held
    (`peak_allocated_bytes`) is not told: the CPU allocator keeps no count.

    *The processes*: a child is kept while its trials succeed and give back what they took (to 2 MiB or 1 % of the
    budget); after any failure the next trial has a fresh one. A used process has up to a few MiB less than a fresh one
    (what its first trial left), never more: a size that ran in it runs in a fresh one; one that just did not may.
    From one fresh process to the next the memory left to a trial differs by some 100 KiB.

    Args:
        settings: What all trials have in common.
        memory: The budget, a share being one of what the machine or the cgroup has in all; None: what is free once
            the workload is loaded.
        reserve: Taken off the budget (see `choose_budget` for the default).
        on_output: Gets each line the workload prints; None: it goes to stderr.

    Raises:
        NotMeasuredError: This is not Linux.
    """

    def __init__(
        self,
        settings: TrialSettings,
        *,
        memory: MemorySize | None = None,
        reserve: MemorySize | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise NotMeasuredError(
                f"trials on the CPU need Linux, this is {sys.platform}",
                hint="only there can a process be held to a budget so that the allocator itself refuses",
            )
        self._settings = settings
        self._memory = memory
        self._reserve = reserve
        self._on_output = on_output
        self._worker: Worker | None = None
        self._resets_peak = True
        self._host: HostMemory | None = None
        self._limit_bytes: int | None = None

    @property
    def name(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def limit_bytes(self) -> int:
        """The budget in bytes; the first time, it is measured with the workload loaded.

        Raises:
            UsageError: `memory` is more than what is free, or nothing is left of it beside `reserve`.
            WorkloadError, NotMeasuredError: As `inspect`.
        """
        if self._limit_bytes is None:
            self._use_worker()
        assert self._limit_bytes is not None
        return self._limit_bytes

    def describe(self) -> Mapping[str, Any]:
        """What the plan records: name, kind, total and free bytes when the budget was set, and how it is enforced."""
        limit_bytes = self.limit_bytes
        assert self._host is not None
        return {
            "name": self.name,
            "kind": "cpu",
            "total_bytes": self._host.total_bytes,
            "free_bytes": self._host.free_bytes,
            "bound": self._host.bound,
            "limit_bytes": limit_bytes,
            "enforced_by": "RLIMIT_DATA above VmData after loading",
            "peak": "VmHWM above what was resident before, and what is untouched"
            if self._resets_peak
            else "VmHWM, never reset",
        }

    def inspect(self) -> Inspection:
        """Load and check the workload, without a limit on memory.

        Raises:
            WorkloadError: The workload is not usable.
            UsageError: The budget is not (see `limit_bytes`).
            DoesNotFitError: Two samples already run the machine itself out of memory.
            NotMeasuredError: Its process died or hung.
        """
        worker = self._use_worker()
        inspection = worker.inspect()
        self._end_if_spoilt()
        return inspection

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """Run one trial; `fresh` asks for a process that has done nothing but load the workload.

        Raises:
            WorkloadError: The workload cannot be loaded.
            UsageError: The budget cannot be set (see `limit_bytes`).
            NotMeasuredError: A process cannot be started, or does not get as far as a trial.
        """
        worker = self._use_worker(fresh=fresh or not self._resets_peak)
        trial = worker.trial(parts, self.limit_bytes, limit_bytes, limit_seconds)
        self._end_if_spoilt()
        return trial

    def close(self) -> None:
        """End every process of this device's own. Idempotent; another question would start a new one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def __enter__(self) -> CpuDevice:
        """Nothing is started before the first question."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.close()

    def _use_worker(self, *, fresh: bool = False) -> Worker:
        """The process at hand, or a new one; with the first one the budget is set."""
        if self._worker is not None and (not self._worker.alive or (fresh and self._worker.jobs > 0)):
            self.close()
        if self._worker is None:
            self._worker = Worker(self._settings, on_output=self._on_output)
            self._resets_peak = self._worker.resets_peak
        if self._limit_bytes is None:
            self._host = read_host_memory()
            self._limit_bytes = choose_budget(self._host, self._memory, self._reserve)
        return self._worker

    def _end_if_spoilt(self) -> None:
        """A process that keeps what a trial took would leave less to the next."""
        assert self._limit_bytes is not None
        tolerated = max(_LEAST_KEPT_BYTES, int(self._limit_bytes * _KEPT_SHARE))
        if self._worker is not None and self._worker.kept_bytes > tolerated:
            self.close()
