"""Trials in children on a card: its limit, its retries, its deaths, and others on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import make_settings

from autoaccum.devices.base import Device
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.meters import CardMeter, card_limit, read_card
from autoaccum.errors import UsageError
from autoaccum.units import GIB, MIB

RETRYING, ASSERTING, BIG = 3, 5, 7
HELD_BYTES = 2 * GIB
CARD = torch.device("cuda", 0)

WORKLOAD = f"""
import itertools
import torch
from torch import nn

growing = itertools.count(300, 20)

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 10))

def batch(size):
    return torch.randn(size, 64), torch.randint(0, 10, (size,))

def loss(model, batch):
    inputs, targets = batch
    if inputs.is_cuda and len(inputs) == {RETRYING}:
        # Freed at once, each is a segment in the cache that is too small for the next, which finds no room beside it.
        torch.empty(next(growing) * 2**20, dtype=torch.uint8, device=inputs.device)
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


@pytest.fixture
def reference(write_workload: Callable[[str], str]) -> str:
    return write_workload(WORKLOAD)


def make_device(place: torch.device, reference: str, memory_bytes: int | None = None) -> Device:
    if place.type == "cpu":
        return CpuDevice(make_settings(reference, 64, memory_bytes or 128 * MIB))
    return CudaDevice(make_settings(reference, 64, memory_bytes), index=place.index)


def test_peaks_are_reported_and_more_than_there_is(place: torch.device, reference: str) -> None:
    with make_device(place, reference) as device:
        trial = device.trial((16, 16))
        assert trial.outcome == "ok", trial.message
        assert trial.peak_reserved_bytes is not None
        if place.type == "cuda":
            assert trial.allocator_retries == 0
            assert 0 < (trial.peak_allocated_bytes or 0) <= trial.peak_reserved_bytes <= device.limit_bytes
        big = device.trial((BIG, 1))
        assert (big.outcome, big.phase) == ("oom", "forward")
        assert "asked for 1024.0 GiB more" in str(big.message)
        assert device.trial((2, 2)).outcome == "ok"


@pytest.mark.gpu
def test_a_size_that_runs_only_by_retries_is_tight(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)  # Expandable segments grow instead.
    with make_device(CARD, reference, 600 * MIB) as device:
        trial = device.trial((RETRYING, RETRYING))
        assert (trial.outcome, trial.ran) == ("tight", True), trial.message
        assert (trial.allocator_retries or 0) >= 1
        after = device.trial((2, 2))
    assert (after.outcome, after.allocator_retries) == ("ok", 0)


@pytest.mark.gpu
def test_a_device_side_assert_is_an_error_and_ends_its_process(reference: str) -> None:
    with make_device(CARD, reference) as device:
        assert device.trial((2, 2)).outcome == "ok"
        trial = device.trial((ASSERTING, 2))
        assert (trial.outcome, trial.fault) == ("error", "user"), trial.message
        assert "broke the card's context" in str(trial.message)
        after = device.trial((2, 2))
    assert (after.outcome, after.fresh) == ("ok", True)


@pytest.mark.gpu
def test_the_fraction_is_a_real_limit_and_is_restored() -> None:
    def take(mebibytes: int) -> torch.Tensor:
        return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=CARD)

    torch.cuda.empty_cache()
    before = torch.cuda.get_per_process_memory_fraction(0)
    limit_bytes = torch.cuda.memory_reserved(0) + 64 * MIB
    meter = CardMeter(0)
    meter.start()
    with card_limit(0, limit_bytes):
        assert read_card(0).allowed_bytes == pytest.approx(limit_bytes, abs=2)
        kept = take(32)
        with pytest.raises(torch.OutOfMemoryError):
            take(256)
        with card_limit(0, 2 * limit_bytes), pytest.raises(torch.OutOfMemoryError):  # Only ever lowered.
            take(256)
        trial = meter.record((1, 1), limit_bytes)
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(before)
    assert (trial.peak_reserved_bytes or 0) <= limit_bytes
    assert (trial.peak_allocated_bytes or 0) >= kept.nbytes
    assert (trial.outcome, trial.allocator_retries) == ("tight", 2)
    assert take(256).nbytes == 256 * MIB


@pytest.mark.gpu
def test_memory_of_another_process_is_refused_and_named(reference: str) -> None:
    torch.cuda.empty_cache()
    with make_device(CARD, reference) as device:
        alone_bytes, free_bytes = device.limit_bytes, device.describe().free_bytes
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], text=True, **pipes) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "ready\n"
            with make_device(CARD, reference) as device:
                assert device.limit_bytes < alone_bytes - HELD_BYTES // 2
                others = device.describe().properties["other_processes"]
            # The budget leaves 2 % of what is free, more than is held of a large card.
            with (
                make_device(CARD, reference, free_bytes) as device,
                pytest.raises(UsageError, match="has free") as seen,
            ):
                device.inspect()
        finally:
            holder.kill()
    if others is not None and any(other["pid"] == holder.pid for other in others):
        assert f"process {holder.pid} holds" in str(seen.value)
