"""The contract of all devices: add one to `DEVICES`, and it runs the same suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planned import make_settings
from warm_children import Nurseries, warmed

from autoaccum.devices.base import Device, Trial, TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import Tracer
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.errors import WorkloadError
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Phase
from autoaccum.units import GIB, MIB

UNLUCKY_SIZE = 7
SLOW_SIZE = 11

WORKLOAD = """
import time
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

def batch(size):
    return torch.randn(size, 3, SIDE, SIDE), torch.randint(0, 10, (size,))

def loss(model, batch):
    if len(batch[0]) == UNLUCKY_SIZE:
        raise ValueError("seven is unlucky")
    if len(batch[0]) == SLOW_SIZE:
        time.sleep(60)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@dataclass(frozen=True)
class Case:
    """A device, and sizes that suit it: `impossible` samples need more than the budget, `large` less than half.

    `failed_at`: the words for where the user's code failed in a trial, and the phase of the record.
    """

    make: Callable[[TrialSettings], Device]
    budget_bytes: int
    side: int
    large: int
    impossible: int
    noise_bytes: int
    warmth_bytes: int
    failed_at: tuple[str, Phase | None] = ("micro-batch 7, forward", "forward")

    def device(self, reference: str) -> Device:
        return self.make(make_settings(reference, self.impossible, self.budget_bytes))

    def workload(self) -> str:
        values = {"SIDE": self.side, "UNLUCKY_SIZE": UNLUCKY_SIZE, "SLOW_SIZE": SLOW_SIZE}
        return "".join(f"{name} = {value}\n" for name, value in values.items()) + WORKLOAD


def simulated(settings: TrialSettings) -> Device:
    card = find_card("rtx3090")
    return SimulatedDevice(
        card,
        TraceCache(lambda: Tracer(settings, card), settings.rank_samples),
        torch_version=read_torch_release(),
        memory=settings.options.memory,
        environment={},
    )


DEVICES = {
    "cpu": Case(
        make=CpuDevice,
        budget_bytes=60 * MIB,
        side=16,
        large=300,
        impossible=2000,
        noise_bytes=MIB,
        # What a process keeps for good (compiled kernels) is paid by its first trials only.
        warmth_bytes=8 * MIB,
    ),
    "cuda": Case(
        make=CudaDevice,
        budget_bytes=2 * GIB,
        side=64,
        large=600,
        impossible=8000,
        noise_bytes=64 * MIB,
        warmth_bytes=64 * MIB,
    ),
    "simulated": Case(
        make=simulated,
        budget_bytes=300 * MIB,
        side=64,
        large=75,
        impossible=800,
        # The same trace is replayed to the same end.
        noise_bytes=1,
        warmth_bytes=1,
        failed_at=("micro-batch 7 on the simulated card, in forward", None),
    ),
}


@pytest.fixture(scope="module", params=["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def case(request: pytest.FixtureRequest) -> Case:
    return DEVICES[request.param]


@pytest.fixture(scope="module")
def device(case: Case, write_workload: Any, nurseries: Nurseries) -> Iterator[Device]:
    with nullcontext() if case is DEVICES["cuda"] else warmed(nurseries.__getitem__):
        made = case.device(write_workload(case.workload()))
        yield made
        made.close()


def peak_of(trial: Trial) -> int:
    assert trial.outcome == "ok", trial.message
    assert trial.peak_reserved_bytes is not None
    return trial.peak_reserved_bytes


def test_knows_its_budget_and_itself(case: Case, device: Device) -> None:
    assert device.limit_bytes == case.budget_bytes
    described = device.describe()
    assert described.name == device.name
    assert (described.total_bytes or 0) >= (described.free_bytes or 0) >= case.budget_bytes
    assert {"limit_bytes", "enforced_by", "peak"} <= set(described.properties)


def test_inspects_before_any_trial(device: Device) -> None:
    inspection = device.inspect()
    assert (inspection.workload.name, inspection.workload.model, inspection.workload.optimizer) == (
        "model",
        "Sequential",
        "AdamW",
    )
    assert inspection.workload.parameters == 3 * 16 * 9 + 16 + 16 * 16 * 9 + 16 + 16 * 10 + 10
    assert inspection.workload.parameter_bytes == 4 * inspection.workload.parameters
    assert (inspection.spec.precision, inspection.workload.reduction, inspection.workload.weight) == (
        "fp32",
        "mean",
        "samples",
    )
    assert {"python", "torch", "platform"} <= set(inspection.environment)
    assert inspection.warnings == ()


def test_runs_one_sample(device: Device) -> None:
    trial = device.trial((1, 1))
    assert (trial.outcome, trial.phase, trial.message, trial.fault) == ("ok", None, None, None)
    assert (trial.parts, trial.micro_batch) == ((1, 1), 1)
    assert trial.seconds > 0


def test_larger_parts_need_more_within_the_budget(case: Case, device: Device) -> None:
    third = case.large // 3
    peaks = [peak_of(device.trial((size, size))) for size in (1, third, 2 * third, 3 * third)]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 2 * peaks[0]
    assert peaks[-1] <= device.limit_bytes


def test_one_trial_is_like_the_other_in_a_fresh_process(case: Case, device: Device) -> None:
    parts = (case.large * 2 // 3,) * 2
    device.trial(parts)
    shared = device.trial(parts)
    first, second = device.trial(parts, fresh=True), device.trial(parts, fresh=True)
    assert first.fresh
    assert second.fresh
    assert peak_of(first) == pytest.approx(peak_of(second), abs=case.noise_bytes)
    assert peak_of(first) - case.warmth_bytes < peak_of(shared) < peak_of(first) + case.noise_bytes


def test_an_impossible_size_is_out_of_memory_and_does_no_harm(case: Case, device: Device) -> None:
    trial = device.trial((case.impossible,))
    assert (trial.outcome, trial.ran, trial.fault) == ("oom", False, None)
    assert trial.phase in ("forward", "backward")
    assert trial.is_definite_oom
    assert trial.message is not None
    assert f"micro-batch {case.impossible}" in trial.message
    after = device.trial((1, 1))
    assert after.outcome == "ok"
    assert after.fresh


@pytest.mark.slow
def test_a_trial_may_have_a_shorter_time_of_its_own(device: Device) -> None:
    device.trial((1, 1))
    trial = device.trial((SLOW_SIZE, 1), limit_seconds=1)
    assert (trial.outcome, trial.timed_out, trial.fault) == ("error", True, "measurement")
    assert trial.message is not None
    assert "ended" in trial.message
    assert " 1 s" in trial.message
    after = device.trial((1, 1))
    assert (after.outcome, after.timed_out, after.fresh) == ("ok", False, True)


def test_an_error_of_the_users_is_theirs_and_does_no_harm(case: Case, device: Device) -> None:
    trial = device.trial((UNLUCKY_SIZE, 1))
    where, phase = case.failed_at
    assert (trial.outcome, trial.fault, trial.phase) == ("error", "user", phase)
    assert trial.message == f"{where} raised ValueError: seven is unlucky"
    assert trial.traceback is not None
    assert "in loss" in trial.traceback
    assert "autoaccum" not in trial.traceback
    assert device.trial((1, 1)).outcome == "ok"


def test_an_unusable_workload_is_refused(case: Case, write_workload: Any) -> None:
    with case.device(write_workload("def model(): pass")) as made, pytest.raises(WorkloadError, match="batch"):
        made.inspect()


def test_closing_leaves_no_process(device: Device, nurseries: Nurseries) -> None:
    device.trial((2, 1))
    assert children_of_this_process(nurseries)
    device.close()
    device.close()
    assert not children_of_this_process(nurseries)


def children_of_this_process(nurseries: Nurseries) -> list[str]:
    """Those that run trials: a process of multiprocessing's own may be there since an earlier test."""
    own = {str(nursery.pid) for nursery in nurseries.values()}
    main_thread = Path("/proc/self/task") / Path("/proc/self").resolve().name
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in (main_thread / "children").read_text().split()}
    return [pid for pid, command in commands.items() if pid not in own and runs_trials(command)]


def runs_trials(command: Path) -> bool:
    return any(name in command.read_bytes() for name in (b"autoaccum.devices.child", b"warm_children.py"))
