"""Memory of a Linux machine or of the cgroup of this process, and of this process itself; its limit and its peak.

Both versions of cgroups are read as in the kernel's documentation (admin-guide/cgroup-v1/memory.rst and
admin-guide/cgroup-v2.rst), from the process's own group up to the mount point, since any ancestor may set the limit.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autoaccum.devices.budget import AvailableMemory
from autoaccum.errors import NotMeasuredError
from autoaccum.units import KIB, MIB

_ROOT = Path("/")
_UNLIMITED_V1_BYTES = 2**62
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Page cache and slab, which the kernel drops before it kills a process; tmpfs pages count as anonymous."""


@dataclass(frozen=True)
class Cgroup:
    """A directory of the memory controller."""

    directory: Path
    version: int

    def limit_bytes(self) -> int | None:
        """Return the smallest limit set on this group itself; None if there is none.

        `memory.high` counts too: above it the kernel slows a process down to a near standstill.
        """
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limits = [int(text) for name in names if (text := _read_text(self.directory / name)).isdigit()]
        limits = [limit for limit in limits if limit < _UNLIMITED_V1_BYTES]
        return min(limits) if limits else None

    def used_bytes(self) -> int:
        """Return the bytes charged to this group and its descendants, without those that the kernel reclaims first."""
        usage = _read_text(self.directory / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        stat = _read_table(self.directory / "memory.stat")
        prefix = "" if self.version == 2 else "total_"
        reclaimable = sum(stat.get(prefix + name, 0) for name in _RECLAIMABLE)
        return max(0, int(usage or 0) - reclaimable)


def read_host_memory(root: Path = _ROOT) -> AvailableMemory:
    """Return the total and the free memory, by the tightest of the machine and its cgroups, without swap.

    Args:
        root: The folder of `proc` and the mount points; tests have their own.

    Raises:
        NotMeasuredError: There is no `/proc/meminfo` to read.
    """
    meminfo = _read_table(root / "proc/meminfo", unit=KIB)
    if "MemAvailable" not in meminfo or "MemTotal" not in meminfo:
        raise NotMeasuredError("/proc/meminfo does not tell how much memory there is", hint="this needs Linux")
    total, free, bound = meminfo["MemTotal"], meminfo["MemAvailable"], "the machine"
    for group in memory_cgroups(root):
        limit = group.limit_bytes()
        if limit is None:
            continue
        total = min(total, limit)
        left = max(0, limit - group.used_bytes())
        if left < free:
            free, bound = left, f"the cgroup {group.directory}"
    return AvailableMemory(total, free, bound)


def count_oom_kills(root: Path = _ROOT) -> int:
    """Return how many processes the kernel has killed for lack of memory so far: two readings are compared.

    The count is that of this process's own cgroup if it has one: it also rises when the whole machine runs out of
    memory (`__oom_kill_process` in the kernel's mm/oom_kill.c), and other containers do not change it. Otherwise it is
    that of `/proc/vmstat`.
    """
    kills = _read_table(root / "proc/vmstat").get("oom_kill", 0)
    own = next(memory_cgroups(root), None)
    if own is None:
        return kills
    name = "memory.events" if own.version == 2 else "memory.oom_control"
    return _read_table(own.directory / name).get("oom_kill", kills)


def memory_cgroups(root: Path = _ROOT) -> Iterator[Cgroup]:
    """Yield the memory cgroups of this process: its own first, then every ancestor that is visible.

    In a container the path may be the machine's; then only the mount point is visible.
    """
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        directory = top / path.strip("/")
        for candidate in [directory, *directory.parents]:
            if (candidate / "memory.stat").exists():
                yield Cgroup(candidate, 1 if controllers else 2)
            if candidate == top:
                break


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_table(path: Path, *, unit: int = 1) -> dict[str, int]:
    """Read lines of `name value` or `name: value kB`; others are skipped."""
    table = {}
    for line in _read_text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            table[words[0]] = int(words[1]) * unit
    return table


_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class ProcessMemory:
    """A reading of `/proc/self/status` in bytes: VmData, RssAnon, RssFile, RssShmem, VmHWM (proc_pid_status(5)).

    `data_bytes` is the private writable address space, touched or not, which RLIMIT_DATA limits. `peak_bytes` is the
    largest resident size since the peak was last reset.
    """

    data_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    peak_bytes: int

    def peak_above(self, before: ProcessMemory) -> int:
        """Return the peak above the reading `before`, in bytes, as RLIMIT_DATA counts, without code.

        The kernel's peak is of resident pages only, so memory that was requested since `before` and is still untouched
        is added (oneDNN reserves 256 KiB for every kernel it compiles). Pages of files stay resident once touched, so
        they are subtracted: they are neither model nor batch.
        """
        resident = self.peak_bytes - self.file_bytes - before.anonymous_bytes - before.shared_bytes
        return max(0, resident) + max(0, self.untouched_bytes - before.untouched_bytes)

    @property
    def untouched_bytes(self) -> int:
        """The part of the private address space that is not resident."""
        return self.data_bytes - self.anonymous_bytes


def read_process_memory() -> ProcessMemory:
    """Read the memory that this process holds now; raise NotMeasuredError if the kernel does not say."""
    fields = _read_table(_STATUS, unit=KIB)
    try:
        return ProcessMemory(*(fields[name] for name in ("VmData", "RssAnon", "RssFile", "RssShmem", "VmHWM")))
    except KeyError as error:
        raise NotMeasuredError(f"{_STATUS} does not tell what this process holds", hint="this needs Linux") from error


def reset_peak() -> None:
    """Reset VmHWM (proc_pid_clear_refs(5), the value 5); raise NotMeasuredError if the kernel does not allow it."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError as error:
        raise NotMeasuredError(
            f"the peak of a process cannot be reset here ({error})", hint="mount /proc so that it can be written"
        ) from error


@contextmanager
def data_limit(limit_bytes: int) -> Iterator[None]:
    """Have the kernel refuse this process private writable memory beyond `limit_bytes` within.

    It sets the soft RLIMIT_DATA, which can be lifted again: an allocation fails with ENOMEM, and the process goes on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [limit_bytes, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def check_data_limit() -> None:
    """Raise NotMeasuredError if private memory beyond the limit is granted (Linux before 4.7, some sandboxes)."""
    with data_limit(read_process_memory().data_bytes + 4 * MIB):
        try:
            mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return
    raise NotMeasuredError(
        "this kernel does not hold a process to RLIMIT_DATA, so no trial could be limited",
        hint="use Linux 4.7 or newer, outside of a sandbox that leaves resource limits out",
    )
