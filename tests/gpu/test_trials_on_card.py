"""Trials in children on a card: its limit, its retries, its deaths, and others on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.child.process import PACKAGE_ROOT
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.meters import CardMeter, card_limit, read_card
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.units import GIB, MIB, MemorySize

RETRYING, ASSERTING, BIG = 3, 5, 7
HELD_BYTES = 2 * GIB

WORKLOAD = f"""
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 10))

def batch(size):
    return torch.randn(size, 64), torch.randint(0, 10, (size,))

def loss(model, batch):
    inputs, targets = batch
    if inputs.is_cuda and len(inputs) == {RETRYING}:
        # Freed at once, each is a segment of its own size in the cache: the third finds room only without the others.
        for mebibytes in (300, 320, 340):
            torch.empty(mebibytes * 2**20, dtype=torch.uint8, device=inputs.device)
    if inputs.is_cuda and len(inputs) == {ASSERTING}:
        targets = targets + 1000
    if len(inputs) == {BIG}:
        torch.empty(2**40, dtype=torch.uint8, device=inputs.device)
    return nn.functional.cross_entropy(model(inputs), targets)

precision = "bf16"
"""

HOLDER = f"""
import torch
held = torch.empty({HELD_BYTES}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
input()
"""


def make_device(place: torch.device, reference: str, **options: Any) -> Device:
    memory = options.pop("memory", MemorySize(bytes=128 * MIB) if place.type == "cpu" else None)
    settings = TrialSettings(reference=reference, share=64, options=Options(memory=memory), **options)
    return CpuDevice(settings) if place.type == "cpu" else CudaDevice(settings, index=place.index)


@pytest.fixture
def reference(write_workload: Callable[[str], str]) -> str:
    return write_workload(WORKLOAD)


@contextmanager
def another_process() -> Iterator[int]:
    """A process that holds `HELD_BYTES` of the first card; its pid."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PACKAGE_ROOT
    ) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "ready\n"
            yield holder.pid
        finally:
            holder.kill()


def test_a_trial_in_half_precision_reports_its_peaks(place: torch.device, reference: str) -> None:
    with make_device(place, reference) as device:
        trial = device.trial((16, 16))
    assert trial.outcome == "ok", trial.message
    assert trial.peak_reserved_bytes is not None
    if place.type == "cuda":
        assert trial.allocator_retries == 0
        assert trial.peak_allocated_bytes is not None
        assert 0 < trial.peak_allocated_bytes <= trial.peak_reserved_bytes <= device.limit_bytes


def test_more_than_there_is_says_what_was_asked_for(place: torch.device, reference: str) -> None:
    with make_device(place, reference) as device:
        trial = device.trial((BIG, 1))
        assert (trial.outcome, trial.phase) == ("oom", "forward")
        assert trial.message is not None
        assert "asked for 1024.0 GiB more" in trial.message
        assert device.trial((1, 2)).phase in (None, "forward")  # BatchNorm refuses one sample.
        assert device.trial((2, 2)).outcome == "ok"


@pytest.mark.gpu
def test_a_size_that_runs_only_by_retries_is_tight(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)  # Expandable segments grow instead.
    with make_device(torch.device("cuda", 0), reference, memory=MemorySize(bytes=700 * MIB)) as device:
        trial = device.trial((RETRYING, RETRYING))
        assert (trial.outcome, trial.ran) == ("tight", True), trial.message
        assert trial.allocator_retries is not None
        assert trial.allocator_retries >= 1
        after = device.trial((2, 2))
    assert (after.outcome, after.allocator_retries) == ("ok", 0)


@pytest.mark.gpu
def test_a_device_side_assert_is_an_error_and_ends_its_process(reference: str) -> None:
    with make_device(torch.device("cuda", 0), reference) as device:
        assert device.trial((2, 2)).outcome == "ok"
        trial = device.trial((ASSERTING, 2))
        assert (trial.outcome, trial.blames) == ("error", "user"), trial.message
        assert trial.message is not None
        assert "broke the card's context" in trial.message
        after = device.trial((2, 2))
    assert (after.outcome, after.fresh) == ("ok", True)


@pytest.mark.gpu
def test_the_fraction_is_a_real_limit_and_is_restored() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction(0)
    limit_bytes = torch.cuda.memory_reserved(0) + 64 * MIB
    meter = CardMeter(0)
    meter.start()
    with card_limit(0, limit_bytes):
        assert torch.cuda.get_per_process_memory_fraction(0) * read_card(0).total_bytes <= limit_bytes + 1
        assert read_card(0).allowed_bytes == pytest.approx(limit_bytes, abs=2)
        kept = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        with card_limit(0, 2 * limit_bytes), pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        reading = meter.read()
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(before)
    assert (reading.peak_reserved_bytes or 0) <= limit_bytes
    assert (reading.peak_allocated_bytes or 0) >= 32 * MIB
    assert reading.retries == 2
    del kept
    assert torch.empty(256 * MIB, dtype=torch.uint8, device="cuda").nbytes == 256 * MIB


@pytest.mark.gpu
def test_memory_of_another_process_is_refused_and_named(reference: str) -> None:
    torch.cuda.empty_cache()
    place = torch.device("cuda", 0)
    with make_device(place, reference) as device:
        alone_bytes, free_bytes = device.limit_bytes, device.describe()["free_bytes"]
    with another_process() as pid:
        with make_device(place, reference) as device:
            assert device.limit_bytes < alone_bytes - HELD_BYTES // 2
            others = device.describe()["other_processes"]
        memory = MemorySize(bytes=free_bytes)  # The budget leaves 2 % of it, more than is held of a large card.
        with (
            make_device(place, reference, memory=memory) as device,
            pytest.raises(UsageError, match="has free") as seen,
        ):
            device.inspect()
    if others is not None and any(other["pid"] == pid for other in others):
        assert f"process {pid} holds" in str(seen.value)


@pytest.mark.gpu
def test_expandable_segments_are_recorded_and_limited(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with make_device(torch.device("cuda", 0), reference, memory=MemorySize(bytes=512 * MIB)) as device:
        variables = device.inspect().environment["variables"]
        assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert device.trial((16, 16)).outcome == "ok"
        assert device.trial((BIG, 2)).outcome == "oom"
