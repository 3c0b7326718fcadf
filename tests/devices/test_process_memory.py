from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest
import torch

from autoaccum.devices import host_memory, meters
from autoaccum.devices.host_memory import ProcessMemory, data_limit, read_process_memory, reset_peak
from autoaccum.devices.inspection import describe_environment
from autoaccum.devices.meters import CardMeter, HostMeter
from autoaccum.errors import NotMeasuredError
from autoaccum.units import GIB, MIB


def map_private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def touch(mapping: mmap.mmap) -> None:
    for offset in range(0, len(mapping), mmap.PAGESIZE):
        mapping[offset] = 1


def test_the_peak_is_what_was_touched_since_it_was_reset() -> None:
    reset_peak()
    before = read_process_memory()
    with map_private(64 * MIB) as mapping:
        touch(mapping)
    first = read_process_memory().peak_above(before)
    assert 63 * MIB < first < 66 * MIB  # The kernel counts pages per processor and adds up late.
    reset_peak()
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


def test_a_lower_limit_from_outside_stays() -> None:
    data = read_process_memory().data_bytes
    with data_limit(data + 32 * MIB), data_limit(data + 256 * MIB), pytest.raises(OSError, match="Cannot allocate"):
        map_private(64 * MIB)


def test_a_kernel_that_cannot_reset_the_peak_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with pytest.raises(NotMeasuredError, match="cannot be reset here"):
        reset_peak()


def test_the_environment_of_a_card_names_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    card, host = (describe_environment(torch.device(kind)) for kind in ("cuda", "cpu"))
    assert card["cuda"] == torch.version.cuda
    assert "cudnn" in card
    assert card["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert card["variables"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not {"cuda", "cudnn"} & set(host)
    assert "PYTORCH_ALLOC_CONF" not in host["variables"]


def memory(peak_bytes: int = 0, shared_bytes: int = 0) -> ProcessMemory:
    return ProcessMemory(0, 0, 0, shared_bytes=shared_bytes, peak_bytes=peak_bytes)


@pytest.mark.parametrize(
    ("after", "outcome", "peak_bytes"),
    [
        (memory(40 * MIB), "ok", 40 * MIB),
        (memory(60 * MIB + 4096), "ok", 60 * MIB),  # The count of pages is coarse, and the limit is not.
        (memory(80 * MIB, shared_bytes=48 * MIB), "oom", 80 * MIB),
    ],
)
def test_shared_memory_alone_can_be_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch, after: ProcessMemory, outcome: str, peak_bytes: int
) -> None:
    readings = iter([memory(), after])
    monkeypatch.setattr(meters, "read_process_memory", lambda: next(readings))
    trial = HostMeter().record((8, 8), 60 * MIB, seconds=1.5)
    assert (trial.parts, trial.seconds, trial.outcome) == ((8, 8), 1.5, outcome)
    assert (trial.peak_reserved_bytes, trial.phase) == (peak_bytes, "update" if outcome == "oom" else None)


@pytest.mark.parametrize(
    ("retries", "outcome", "ending"), [(0, "ok", None), (1, "tight", "once"), (3, "tight", "3 times")]
)
def test_a_trial_that_ran_by_retries_is_tight(
    monkeypatch: pytest.MonkeyPatch, retries: int, outcome: str, ending: str | None
) -> None:
    counters = {"num_alloc_retries": retries, "reserved_bytes.all.peak": 3 * GIB, "allocated_bytes.all.peak": 2 * GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: counters)
    trial = CardMeter(0).record((8, 8), 3 * GIB)
    assert (trial.outcome, trial.ran, trial.allocator_retries) == (outcome, True, retries)
    assert (trial.peak_reserved_bytes, trial.peak_allocated_bytes) == (3 * GIB, 2 * GIB)
    assert str(trial.message).endswith(str(ending))
