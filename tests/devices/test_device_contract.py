"""What every device must do, whatever it measures with: add one to `DEVICES` and it is held to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoaccum.devices.base import Device, Trial, TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.errors import WorkloadError
from autoaccum.units import MIB, MemorySize

SHARE = 2000
BUDGET_BYTES = 60 * MIB
UNLUCKY_SIZE = 7

WORKLOAD = f"""
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

def batch(size):
    return torch.randn(size, 3, 16, 16), torch.randint(0, 10, (size,))

def loss(model, batch):
    if len(batch[0]) == {UNLUCKY_SIZE}:
        raise ValueError("seven is unlucky")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def make_cpu(settings: TrialSettings) -> Device:
    return CpuDevice(settings, memory=MemorySize(bytes=BUDGET_BYTES))


DEVICES: dict[str, Callable[[TrialSettings], Device]] = {"cpu": make_cpu}


@pytest.fixture(scope="module", params=list(DEVICES))
def make_device(request: pytest.FixtureRequest) -> Callable[[TrialSettings], Device]:
    return DEVICES[request.param]


@pytest.fixture(scope="module")
def device(make_device: Callable[[TrialSettings], Device], write_workload: Any) -> Iterator[Device]:
    made = make_device(TrialSettings(reference=write_workload(WORKLOAD), share=SHARE))
    yield made
    made.close()


def peak_of(trial: Trial) -> int:
    assert trial.outcome == "ok", trial.message
    assert trial.peak_reserved_bytes is not None
    return trial.peak_reserved_bytes


def test_knows_its_budget_and_itself(device: Device) -> None:
    assert device.limit_bytes == BUDGET_BYTES
    assert device.describe()["name"] == device.name
    assert device.describe()["limit_bytes"] == BUDGET_BYTES


def test_inspects_before_any_trial(device: Device) -> None:
    inspection = device.inspect()
    assert (inspection.name, inspection.model, inspection.optimizer) == ("model", "Sequential", "AdamW")
    assert inspection.parameters == 3 * 16 * 9 + 16 + 16 * 16 * 9 + 16 + 16 * 10 + 10
    assert inspection.parameter_bytes == 4 * inspection.parameters
    assert (inspection.precision, inspection.reduction, inspection.weight) == ("fp32", "mean", "samples")
    assert {"python", "torch", "platform"} <= set(inspection.environment)
    assert inspection.warnings == ()


def test_runs_one_sample(device: Device) -> None:
    trial = device.trial((1, 1))
    assert (trial.outcome, trial.phase, trial.message, trial.blames) == ("ok", None, None, None)
    assert (trial.parts, trial.micro_batch) == ((1, 1), 1)
    assert trial.seconds > 0


def test_larger_parts_need_more_within_the_budget(device: Device) -> None:
    peaks = [peak_of(device.trial((size, size))) for size in (1, 100, 200, 300)]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 2 * peaks[0]
    assert peaks[-1] <= device.limit_bytes


def test_one_trial_is_like_the_other_in_a_fresh_process(device: Device) -> None:
    device.trial((200, 200))
    shared = device.trial((200, 200))
    first, second = device.trial((200, 200), fresh=True), device.trial((200, 200), fresh=True)
    assert first.fresh
    assert second.fresh
    assert peak_of(first) == pytest.approx(peak_of(second), abs=MIB)
    # What a process keeps for good (compiled kernels) is paid by its first trials only.
    assert peak_of(first) - 8 * MIB < peak_of(shared) < peak_of(first) + MIB


def test_the_whole_share_is_one_micro_batch_per_update(device: Device) -> None:
    trial = device.trial((250,), fresh=True)
    assert peak_of(trial) <= peak_of(device.trial((250, 250), fresh=True)) + MIB


def test_an_impossible_size_is_out_of_memory_and_does_no_harm(device: Device) -> None:
    trial = device.trial((SHARE,))
    assert (trial.outcome, trial.ran, trial.blames) == ("oom", False, None)
    assert trial.phase in ("forward", "backward")
    assert trial.certain
    assert trial.message is not None
    assert f"micro-batch {SHARE}" in trial.message
    after = device.trial((1, 1))
    assert after.outcome == "ok"
    assert after.fresh


def test_an_error_of_the_users_is_theirs_and_does_no_harm(device: Device) -> None:
    trial = device.trial((UNLUCKY_SIZE, 1))
    assert (trial.outcome, trial.blames, trial.phase) == ("error", "user", "forward")
    assert trial.message == "micro-batch 7, forward raised ValueError: seven is unlucky"
    assert trial.traceback is not None
    assert "in loss" in trial.traceback
    assert "autoaccum" not in trial.traceback
    assert device.trial((1, 1)).outcome == "ok"


def test_an_unusable_workload_is_refused(make_device: Callable[[TrialSettings], Device], write_workload: Any) -> None:
    reference = write_workload("def model(): pass")
    with make_device(TrialSettings(reference=reference, share=4)) as made, pytest.raises(WorkloadError, match="batch"):
        made.inspect()


def test_closing_leaves_no_process(device: Device) -> None:
    device.trial((1, 1))
    assert children_of_this_process()
    device.close()
    device.close()
    assert not children_of_this_process()


def children_of_this_process() -> list[str]:
    return Path("/proc/self/task").joinpath(str(Path("/proc/self").resolve().name), "children").read_text().split()
