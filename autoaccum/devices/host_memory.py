"""What memory a Linux machine, or the cgroup this process lives in, has: in all, free, and taken back by the kernel.

Both versions of cgroups are read as the kernel's documentation describes them (admin-guide/cgroup-v1/memory.rst and
admin-guide/cgroup-v2.rst), from this process's own group up to the mount point, since any ancestor may bind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoaccum.devices.budget import Supply
from autoaccum.errors import NotMeasuredError
from autoaccum.units import KIB

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


def read_host_memory(root: Path = _ROOT) -> Supply:
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
    return Supply(total, free, bound)


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
