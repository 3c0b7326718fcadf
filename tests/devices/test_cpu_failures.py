from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planned import make_settings

from autoaccum.devices.child.process import PACKAGE_ROOT
from autoaccum.devices.cpu import CpuDevice
from autoaccum.errors import NotMeasuredError
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

MISBEHAVING = """
    import mmap, os, signal, sys, time
    import torch
    from torch import nn

    def model():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def batch(size):
        return torch.randn(size, 64), torch.randn(size, 64)

    kept, forked = [], []

    def take_shared_memory():
        kept.append(mmap.mmap(-1, 48 * 2**20))
        for _ in range(48):
            kept[-1].write(bytes(2**20))

    def delicate():
        try:
            torch.empty(100 * 2**20, dtype=torch.uint8)
        except RuntimeError:
            os.kill(os.getpid(), signal.SIGSEGV)

    DEEDS = {
        4: lambda: os._exit(7),
        6: lambda: time.sleep(60),
        9: take_shared_memory,
        12: lambda: forked or forked.append(os.fork()),
        13: delicate,
    }

    def loss(model, batch):
        print("a loss of", len(batch[0]))
        DEEDS.get(len(batch[0]), int)()
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def device(write_workload: Any, lines: list[str]) -> Iterator[CpuDevice]:
    settings = make_settings(write_workload(MISBEHAVING), 20, 40 * MIB, trial_limit=3)
    with CpuDevice(dataclasses.replace(settings, on_output=lines.append)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "micro-batch 4: its process left with exit status 7"),
        (6, "micro-batch 6 took longer than 3 s, and was ended: look for what does not end there, or raise --time"),
    ],
)
def test_a_death_is_recorded_for_what_it_is(device: CpuDevice, size: int, message: str) -> None:
    trial = device.trial((size, size))
    assert (trial.outcome, trial.fault) == ("error", "measurement")
    assert str(trial.message).startswith(message)
    assert trial.seconds > 0


def test_a_crash_may_be_out_of_memory(device: CpuDevice) -> None:
    trial = device.trial((13, 13))
    assert (trial.outcome, trial.is_definite_oom, trial.fault, trial.peak_reserved_bytes) == ("oom", False, None, None)
    assert trial.message == "micro-batch 13: its process was ended by SIGSEGV"


def test_a_copy_that_the_workload_forks_does_not_answer(write_workload: Any) -> None:
    settings = make_settings(write_workload(MISBEHAVING), 20, 40 * MIB, trial_limit=60)
    with CpuDevice(settings) as device:
        trials = [device.trial((12, 12)), device.trial((1, 1))]
    assert [(trial.outcome, trial.message) for trial in trials] == [("ok", None)] * 2


def test_shared_memory_beyond_the_budget_counts_though_no_limit_stops_it(device: CpuDevice) -> None:
    trial = device.trial((9,))
    assert trial.outcome == "oom"
    assert trial.message is not None
    assert "shared memory" in trial.message


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_no_child(write_workload: Any) -> None:
    script = f"""
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.sources.source import FileSource
device = CpuDevice(TrialSettings(source=FileSource({write_workload(MISBEHAVING)!r}), share=20))
device.trial((1, 1))
print(device._child.pid, flush=True)
device.trial((6, 6))
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=PACKAGE_ROOT
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.kill()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


def test_a_check_that_hangs_is_ended_in_time(write_workload: Any) -> None:
    hanging = MISBEHAVING.replace('print("a loss of", len(batch[0]))', "time.sleep(60)")
    settings = make_settings(write_workload(hanging), 20, 40 * MIB)
    with CpuDevice(settings) as device, pytest.raises(NotMeasuredError) as seen:
        device.inspect(limit_seconds=1.0)
    assert str(seen.value) == (
        "an update from a small batch took longer than 1 s, and was ended:"
        " look for what does not end there, or raise --time-limit or --trial-limit"
    )
