from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest

from autoaccum.devices import host_meter
from autoaccum.devices.host_meter import check_data_limit, data_limit, read_process_memory, reset_peak
from autoaccum.errors import NotMeasuredError
from autoaccum.units import MIB


def map_private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def touch(mapping: mmap.mmap) -> None:
    for offset in range(0, len(mapping), mmap.PAGESIZE):
        mapping[offset] = 1


def test_the_peak_is_what_was_touched_since_it_was_reset() -> None:
    if not reset_peak():
        pytest.skip("/proc/self/clear_refs cannot be written here")
    before = read_process_memory()
    with map_private(64 * MIB) as mapping:
        touch(mapping)
    first = read_process_memory().peak_above(before)
    assert 63 * MIB < first < 66 * MIB  # The kernel counts pages per processor and adds up late.
    assert reset_peak()
    assert read_process_memory().peak_above(before) < 2 * MIB


def test_untouched_memory_counts_as_the_limit_counts_it() -> None:
    reset_peak()
    before = read_process_memory()
    with map_private(64 * MIB):
        after = read_process_memory()
    assert after.data_bytes - before.data_bytes == 64 * MIB
    assert after.anonymous_bytes - before.anonymous_bytes < MIB
    assert 64 * MIB <= after.peak_above(before) < 66 * MIB


def test_the_limit_refuses_and_is_lifted_again() -> None:
    soft_before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = read_process_memory().data_bytes + 32 * MIB
    with data_limit(limit), pytest.raises(OSError, match="Cannot allocate memory"):
        map_private(64 * MIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == soft_before
    map_private(64 * MIB).close()


def test_no_limit_leaves_everything_as_it_is() -> None:
    with data_limit(None):
        map_private(64 * MIB).close()


def test_the_limit_bites_here() -> None:
    check_data_limit()


def test_without_proc_it_says_that_linux_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_meter, "_STATUS", tmp_path / "status")
    with pytest.raises(NotMeasuredError, match="this needs Linux"):
        read_process_memory()


def test_a_kernel_that_does_not_reset_the_peak_is_told_from_one_that_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_meter, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    assert not reset_peak()
