"""The CPU: a child process under a real limit on its memory, so that PyTorch's own allocator says no."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.budget import AvailableMemory
from autoaccum.devices.child_device import ChildDevice
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.errors import NotMeasuredError
from autoaccum.spec import DeviceFacts


class CpuDevice(ChildDevice):
    """Trials on the CPU of a Linux machine.

    *The budget* counts all private memory that a trial requests after PyTorch was warmed up and the workload's module
    imported: model, batch (the whole share of the rank), gradients, optimizer state, activations, workspaces of
    libraries, late imports. Not counted: PyTorch itself, objects that the module made when it was imported (a dataset,
    a model), pages of files, and shared memory (`/dev/shm`, tmpfs: DataLoader workers pass their batches there). The
    limit is RLIMIT_DATA (getrlimit(2)), set to VmData after loading plus the budget. It counts address space, touched
    or not; swap does not extend it.

    *The peak* (`peak_reserved_bytes`) is VmHWM, reset before the trial, above the resident memory from before it,
    without code of libraries and with shared memory. Memory that was requested and is untouched at the end of the
    trial is added, since the limit counts it (oneDNN reserves 256 KiB for every kernel it compiles). The kernel counts
    resident pages per processor, so the peak is exact to some hundred KiB; pages that were swapped out are missing.
    The bytes that tensors held
    (`peak_allocated_bytes`) are not known: the CPU allocator does not count them.

    *The processes* (see `ChildDevice`): a used one has some MiB more than a fresh one, since what earlier jobs left
    does not count (`HostMeter.limit`). So the answer of a search runs in a fresh process, and what fails in a used one
    would fail in a fresh one, too. Fresh processes differ by some 100 KiB in the memory left for a trial.

    *In a used process* the first update, and the first of two equal parts of the last one, have only as many samples as
    have run there before. The second part has the same gradients and optimizer state beside it, and fails sooner.

    *A crash* in native code counts as an out-of-memory error that is not certain (`Trial.is_definite_oom`): some
    libraries crash when memory is refused (oneDNN's backward of a convolution, torch 2.13: SIGSEGV).

    Args:
        settings: The settings that all trials share. A percentage as `memory` is one of the total of the machine or
            the cgroup; without `memory`, the budget is the memory that is free when the workload is loaded.

    Raises:
        NotMeasuredError: This is not Linux.
    """

    grants_leftovers = True
    _crashes_for_memory = _copies = True

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

    def describe(self) -> DeviceFacts:
        """As `Device`; bytes are those at the choice of the budget."""
        limit_bytes = self.limit_bytes
        assert self._host is not None
        return describe_host(self._host, limit_bytes)

    def _available(self, facts: Mapping[str, Any]) -> AvailableMemory:
        self._host = read_host_memory()
        return self._host


def describe_host(host: AvailableMemory, limit_bytes: int) -> DeviceFacts:
    """Return what a plan records of trials on the CPU within a limit on their memory."""
    return DeviceFacts(
        name="cpu",
        kind="cpu",
        total_bytes=host.total_bytes,
        free_bytes=host.free_bytes,
        properties={
            "bound": host.bound,
            "limit_bytes": limit_bytes,
            "enforced_by": "RLIMIT_DATA above VmData after loading",
            "peak": "VmHWM above what was resident before, and what is untouched",
        },
    )
