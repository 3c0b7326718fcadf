"""The host's memory: RLIMIT_DATA and VmHWM, above what the process held after loading."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoaccum.devices.child.replies import Reading
from autoaccum.errors import NotMeasuredError
from autoaccum.units import KIB, MIB


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


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class ProcessMemory:
    """One reading of `/proc/self/status` in bytes: VmData, RssAnon, RssFile, RssShmem, VmHWM (proc_pid_status(5)).

    `data_bytes` is private writable address space, touched or not: what RLIMIT_DATA limits. `peak_bytes` is the most
    that was resident at once since the peak was last reset.
    """

    data_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    peak_bytes: int

    def peak_above(self, before: ProcessMemory) -> int:
        """The most that was held above the reading `before`, in bytes, as RLIMIT_DATA counts, code left out.

        The kernel keeps a high-water mark of resident pages only, so what was asked for since then and is still
        untouched (oneDNN reserves 256 KiB for every kernel it compiles) is added. Pages of files that were touched
        for the first time stay resident, so they are taken off: neither a model nor a batch is made of them.
        """
        resident = self.peak_bytes - self.file_bytes - before.anonymous_bytes - before.shared_bytes
        return max(0, resident) + max(0, self._untouched_bytes - before._untouched_bytes)

    @property
    def _untouched_bytes(self) -> int:
        return self.data_bytes - self.anonymous_bytes


def read_process_memory() -> ProcessMemory:
    """Read what this process holds now.

    Raises:
        NotMeasuredError: The kernel does not tell.
    """
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        names = ("VmData", "RssAnon", "RssFile", "RssShmem", "VmHWM")
        return ProcessMemory(*(int(fields[name][0]) * KIB for name in names))
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise NotMeasuredError(f"{_STATUS} does not tell what this process holds", hint="this needs Linux") from error


def reset_peak() -> bool:
    """Begin a new VmHWM (proc_pid_clear_refs(5), the value 5); False where the kernel does not allow it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


@contextmanager
def data_limit(limit_bytes: int | None) -> Iterator[None]:
    """Within, the kernel refuses this process private writable memory beyond `limit_bytes`; None: no limit.

    The soft RLIMIT_DATA is set, so that it can be lifted again: what allocates gets ENOMEM and the process lives on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = [bound for bound in (limit_bytes, soft, hard) if bound is not None and bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(wanted) if wanted else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def check_data_limit() -> None:
    """Try the limit once: private memory beyond it must be refused.

    Raises:
        NotMeasuredError: It is granted all the same (Linux before 4.7, some sandboxes).
    """
    with data_limit(read_process_memory().data_bytes + 4 * MIB):
        try:
            mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return
    raise NotMeasuredError(
        "this kernel does not hold a process to RLIMIT_DATA, so no trial could be limited",
        hint="use Linux 4.7 or newer, outside of a sandbox that leaves resource limits out",
    )
