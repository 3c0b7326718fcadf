"""The CPU: a child process under a real limit on its memory, so that PyTorch's own allocator says no."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from autoaccum.devices.base import Trial, TrialSettings
from autoaccum.devices.budget import AvailableMemory, choose_budget, limit_slack
from autoaccum.devices.child_device import ChildDevice
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.errors import NotMeasuredError
from autoaccum.units import MIB, format_bytes


class CpuDevice(ChildDevice):
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

    *The processes* (see `ChildDevice`): a used one has up to a few MiB less than a fresh one (what its first trial
    left), never more: a size that ran in it runs in a fresh one; one that just did not may. From one fresh process to
    the next the memory left to a trial differs by some 100 KiB.

    *A crash*: some libraries do not survive a refusal (oneDNN's backward of a convolution, torch 2.13: SIGSEGV). So
    what ends a trial by a fault in native code is tried once more with half as much memory again: if it runs then, or
    is refused in an orderly way, memory was what it lacked, else the fault is an error.

    Args:
        settings: What all trials have in common; a share as `memory` is one of what the machine or the cgroup has in
            all, and no `memory` what is free once the workload is loaded.

    Raises:
        NotMeasuredError: This is not Linux.
    """

    tolerated_leftover_bytes = 2 * MIB

    def __init__(self, settings: TrialSettings) -> None:
        if sys.platform != "linux":
            raise NotMeasuredError(
                f"trials on the CPU need Linux, this is {sys.platform}",
                hint="only there can a process be held to a budget so that the allocator itself refuses",
            )
        super().__init__(settings)
        self._host: AvailableMemory | None = None

    @property
    def name(self) -> str:
        """`cpu`."""
        return "cpu"

    def describe(self) -> Mapping[str, Any]:
        """What the plan records: name, kind, total and free bytes when the budget was set, and how it is enforced."""
        limit_bytes = self.limit_bytes
        assert self._host is not None
        return {
            "name": self.name,
            "kind": "cpu",
            **dataclasses.asdict(self._host),
            "limit_bytes": limit_bytes,
            "enforced_by": "RLIMIT_DATA above VmData after loading",
            "peak": "VmHWM above what was resident before, and what is untouched"
            if self.resets_peak
            else "VmHWM, never reset",
        }

    def trial(
        self,
        parts: tuple[int, ...],
        *,
        fresh: bool = False,
        limit_bytes: int | None = None,
        limit_seconds: float | None = None,
    ) -> Trial:
        """As `ChildDevice.trial`; after a crash, what it means is found out by a second one."""
        trial = super().trial(parts, fresh=fresh, limit_bytes=limit_bytes, limit_seconds=limit_seconds)
        if not trial.crashed:
            return trial
        held_to_bytes = self.limit_bytes if limit_bytes is None else limit_bytes
        roomy_bytes = held_to_bytes + limit_slack(held_to_bytes, read_host_memory().free_bytes)
        again = super().trial(parts, fresh=True, limit_bytes=roomy_bytes, limit_seconds=limit_seconds)
        if not again.ran and again.outcome != "oom":
            return trial
        ending = "runs" if again.ran else "is refused more"
        return dataclasses.replace(
            trial,
            outcome="oom",
            blames=None,
            message=f"{trial.message}, and {ending} within {format_bytes(roomy_bytes)}: memory was refused to a "
            "library that does not survive it",
        )

    @property
    def _host_budget_bytes(self) -> int:
        return self.limit_bytes

    def _choose_budget(self, facts: Mapping[str, Any]) -> int:
        self._host = read_host_memory()
        return choose_budget(self._host, self._settings.options.memory, self._settings.options.reserve)
