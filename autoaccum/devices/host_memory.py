"""What memory a Linux machine, or the cgroup this process lives in, has: in all, free, and taken back by the kernel.

Both versions of cgroups are read as the kernel's documentation describes them (admin-guide/cgroup-v1/memory.rst and
admin-guide/cgroup-v2.rst), from this process's own group up to the mount point, since any ancestor may bind.
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
"""Page cache and slab that the kernel drops before it kills; tmpfs pages count as anonymous and are not among them."""


@dataclass(frozen=True)
class Cgroup:
    """One directory of the memory controller."""

    directory: Path
    version: int

    def limit_bytes(self) -> int | None:
        """The tightest limit set on this very group; None when there is none.

        `memory.high` counts too: above it the kernel throttles a process until it hardly moves.
        """
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limits = [int(text) for name in names if (text := _read_text(self.directory / name)).isdigit()]
        limits = [limit for limit in limits if limit < _UNLIMITED_V1_BYTES]
        return min(limits) if limits else None

    def used_bytes(self) -> int:
        """Bytes charged to this group and its descendants, without what the kernel would reclaim first."""
        usage = _read_text(self.directory / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        stat = _read_table(self.directory / "memory.stat")
        prefix = "" if self.version == 2 else "total_"
        reclaimable = sum(stat.get(prefix + name, 0) for name in _RECLAIMABLE)
        return max(0, int(usage or 0) - reclaimable)

    def oom_kills(self) -> int | None:
        """How many processes of this group the kernel has killed for lack of memory; None where it does not tell."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _read_table(self.directory / name).get("oom_kill")


def read_host_memory(root: Path = _ROOT) -> AvailableMemory:
    """What there is and what is free, the tightest of machine and cgroups counting; swap is left out.

    Args:
        root: Where `proc` and the mount points lie; other than `/` only in tests.

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
    """How many processes the kernel has killed for lack of memory so far: compare two readings.

    The counter of this process's own cgroup is taken where there is one, since it also rises when the whole machine
    ran out (`__oom_kill_process` in the kernel's mm/oom_kill.c) and other containers do not touch it; otherwise that
    of `/proc/vmstat`.
    """
    own = next(memory_cgroups(root), None)
    kills = own.oom_kills() if own is not None else None
    return kills if kills is not None else _read_table(root / "proc/vmstat").get("oom_kill", 0)


def memory_cgroups(root: Path = _ROOT) -> Iterator[Cgroup]:
    """The memory cgroups that bind this process, its own first, then every ancestor that can be seen.

    In a container the path may be the machine's, of which only the mount point is there.
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
    """Lines of `name value` or `name: value kB`; anything else is left out."""
    table = {}
    for line in _read_text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            table[words[0]] = int(words[1]) * unit
    return table


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
