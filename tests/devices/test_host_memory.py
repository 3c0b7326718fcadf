from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.devices.host_memory import count_oom_kills, memory_cgroups, read_host_memory
from autoaccum.units import GIB

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   12582912 kB\nSwapFree: 99999999 kB\n"


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    write(tmp_path / "proc/vmstat", "nr_free_pages 5\noom_kill 7")
    write(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def put_v1_group(root: Path, path: str, *, limit: int, usage: int, inactive_file: int = 0, oom_kill: int = 0) -> None:
    group = root / "sys/fs/cgroup/memory" / path
    write(group / "memory.limit_in_bytes", limit)
    write(group / "memory.usage_in_bytes", usage)
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\ntotal_active_file 0")
    write(group / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kill}")


def put_v2_group(root: Path, path: str, *, limit: int | str, usage: int, file: int = 0, oom_kill: int = 0) -> None:
    group = root / "sys/fs/cgroup" / path
    write(group / "memory.max", limit)
    write(group / "memory.high", "max")
    write(group / "memory.current", usage)
    write(group / "memory.stat", f"anon 5\ninactive_file {file}\nactive_file {file}\nslab_reclaimable 0")
    write(group / "memory.events", f"low 0\nhigh 0\nmax 0\noom 3\noom_kill {oom_kill}")


def test_without_cgroups_the_machine_counts(root: Path) -> None:
    memory = read_host_memory(root)
    assert (memory.total_bytes, memory.free_bytes, memory.bound) == (16 * GIB, 12 * GIB, "the machine")
    assert count_oom_kills(root) == 7


def test_a_v1_limit_counts_without_the_page_cache(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/docker/abc\n3:cpu:/docker/abc\n0::/")
    put_v1_group(root, "", limit=4 * GIB, usage=3 * GIB, inactive_file=GIB, oom_kill=2)
    memory = read_host_memory(root)
    assert (memory.total_bytes, memory.free_bytes) == (4 * GIB, 2 * GIB)
    assert "cgroup" in memory.bound
    assert count_oom_kills(root) == 2


def test_the_tightest_ancestor_binds_in_v2(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user.slice/job.scope")
    put_v2_group(root, "user.slice/job.scope", limit="max", usage=GIB, oom_kill=1)
    put_v2_group(root, "user.slice", limit=6 * GIB, usage=5 * GIB, file=GIB, oom_kill=4)
    write(root / "sys/fs/cgroup/memory.stat", "anon 1")
    memory = read_host_memory(root)
    assert (memory.total_bytes, memory.free_bytes) == (6 * GIB, 3 * GIB)
    assert "user.slice" in memory.bound
    assert count_oom_kills(root) == 1
    assert [group.directory.name for group in memory_cgroups(root)] == ["job.scope", "user.slice", "cgroup"]


def test_memory_high_binds_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    put_v2_group(root, "a", limit=8 * GIB, usage=GIB)
    write(root / "sys/fs/cgroup/a/memory.high", 2 * GIB)
    assert read_host_memory(root).free_bytes == GIB
