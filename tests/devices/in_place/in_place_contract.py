"""What every device must do (see tests/devices/test_device_contract.py), asked of trials in place, on both subjects."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.changes import state_digest
from autoaccum.devices.base import Device, Trial
from autoaccum.devices.in_place import InPlaceDevice, LiveObjects
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.units import MIB, MemorySize
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import resolve_objective

SHARE = 2000
BUDGET_BYTES = 60 * MIB
UNLUCKY_SIZE = 7

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="trials on the CPU need Linux")


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def batch(size: int) -> Any:
    return torch.randn(size, 3, 16, 16), torch.randint(0, 10, (size,))


def loss(model: nn.Module, batch: Any) -> Tensor:
    if len(batch[0]) == UNLUCKY_SIZE:
        raise ValueError("seven is unlucky")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


MODEL = build_model()
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


def live() -> LiveObjects:
    return LiveObjects(
        model=MODEL, batch=batch, objective=resolve_objective(loss), options=Options(optimizer=OPTIMIZER), name="net"
    )


def workload() -> Workload:
    return Workload(model=build_model, batch=batch, loss=loss, name="net")


SUBJECTS: dict[str, Callable[[], Any]] = {"live": live, "workload": workload}


@pytest.fixture(scope="module", params=list(SUBJECTS))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with InPlaceDevice(SUBJECTS[request.param](), share=SHARE, memory=MemorySize(bytes=BUDGET_BYTES)) as made:
        yield made


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = state_digest(MODEL, OPTIMIZER), resource.getrlimit(resource.RLIMIT_DATA)
    yield
    assert (state_digest(MODEL, OPTIMIZER), resource.getrlimit(resource.RLIMIT_DATA)) == before


def peak_of(trial: Trial) -> int:
    assert trial.outcome == "ok", trial.message
    assert trial.peak_reserved_bytes is not None
    return trial.peak_reserved_bytes


def test_knows_its_budget_and_itself(device: Device) -> None:
    described = device.describe()
    assert device.limit_bytes == BUDGET_BYTES
    assert (described["name"], described["kind"]) == (device.name, "cpu")
    assert described["limit_bytes"] == BUDGET_BYTES
    assert described["in_place"]
    assert described["total_bytes"] >= described["free_bytes"] > BUDGET_BYTES


def test_inspects_before_any_trial(device: Device) -> None:
    inspection = device.inspect()
    assert (inspection.name, inspection.model, inspection.optimizer) == ("net", "Sequential", "AdamW")
    assert inspection.parameters == 3 * 16 * 9 + 16 + 16 * 16 * 9 + 16 + 16 * 10 + 10
    assert inspection.parameter_bytes == 4 * inspection.parameters
    assert (inspection.precision, inspection.reduction, inspection.weight) == ("fp32", "mean", "samples")
    assert {"python", "torch", "platform"} <= set(inspection.environment)
    assert inspection.update_bytes is not None
    assert [warning.split(",")[0] for warning in inspection.cautions] == ["trials ran in this process"]


def test_runs_one_sample(device: Device) -> None:
    trial = device.trial((1, 1))
    assert (trial.outcome, trial.phase, trial.message, trial.blames) == ("ok", None, None, None)
    assert (trial.parts, trial.micro_batch, trial.fresh) == ((1, 1), 1, False)
    assert trial.seconds > 0


def test_larger_parts_need_more_within_the_budget(device: Device) -> None:
    peaks = [peak_of(device.trial((size, size))) for size in (1, 150, 300, 450)]
    assert peaks[0] < peaks[2] < peaks[3]
    assert peaks[-1] > 2 * peaks[0]
    assert peaks[-1] <= device.limit_bytes


def test_one_trial_is_like_the_other(device: Device) -> None:
    device.trial((200, 200))
    # Other tests have left their pieces in this process.
    assert peak_of(device.trial((200, 200))) == pytest.approx(peak_of(device.trial((200, 200))), abs=8 * MIB)


def test_an_impossible_size_is_out_of_memory_and_does_no_harm(device: Device) -> None:
    trial = device.trial((SHARE,))
    assert (trial.outcome, trial.ran, trial.blames) == ("oom", False, None)
    assert trial.phase in ("forward", "backward", "update")
    assert trial.certain
    assert trial.message is not None
    assert f"micro-batch {SHARE}" in trial.message
    assert device.trial((1, 1)).outcome == "ok"


def test_a_size_just_too_large_runs_to_its_end_and_is_out_of_memory(device: Device) -> None:
    trial = device.trial((800, 800))
    assert (trial.outcome, trial.phase, trial.certain) == ("oom", "update", True)
    assert trial.peak_reserved_bytes is not None
    assert BUDGET_BYTES < trial.peak_reserved_bytes < 2 * BUDGET_BYTES
    assert trial.message is not None
    assert "MiB more than it may" in trial.message


def test_a_trial_can_have_a_budget_of_its_own(device: Device) -> None:
    trial = device.trial((300, 300), limit_bytes=12 * MIB)
    assert (trial.outcome, trial.limit_bytes) == ("oom", 12 * MIB)
    assert device.trial((300, 300), fresh=True, limit_seconds=1e-9).outcome == "ok"


def test_an_error_of_the_users_is_theirs_and_does_no_harm(device: Device) -> None:
    trial = device.trial((UNLUCKY_SIZE, 1))
    assert (trial.outcome, trial.blames, trial.phase) == ("error", "user", "forward")
    assert trial.message == "micro-batch 7, forward raised ValueError: seven is unlucky"
    assert trial.traceback is not None
    assert "in loss" in trial.traceback
    assert "autoaccum/" not in trial.traceback.replace("tests/", "")
    assert device.trial((1, 1)).outcome == "ok"


def test_other_threads_are_not_limited(device: Device) -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, name="progress bar", daemon=True)
    other.start()
    try:
        with pytest.raises(UsageError, match=r"other Python threads .*: progress bar \(Thread\): end them first, or"):
            device.trial((1, 1))
    finally:
        stop.set()
        other.join()
    assert device.trial((1, 1)).outcome == "ok"
