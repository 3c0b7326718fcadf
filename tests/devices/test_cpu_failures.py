from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
from planned import LINEAR_FILE, make_settings

from autoaccum.devices.cpu import CpuDevice
from autoaccum.errors import DoesNotFitError, NotMeasuredError
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

MISBEHAVING = f"""{LINEAR_FILE}
import mmap

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

DEEDS = {{
    4: lambda: os._exit(7),
    9: take_shared_memory,
    12: lambda: forked or forked.append(os.fork()),
    13: delicate,
}}

def loss(model, batch):
    print("a loss of", len(batch[0]))
    DEEDS.get(len(batch[0]), int)()
    return nn.functional.mse_loss(model(batch[0]), batch[1])

del criterion
"""


@pytest.fixture(scope="module")
def device(write_workload: Any) -> Iterator[CpuDevice]:
    settings = make_settings(write_workload(MISBEHAVING), 20, 40 * MIB, trial_limit=60)
    with CpuDevice(dataclasses.replace(settings, on_output=lambda line: None)) as made:
        yield made


def test_a_death_is_recorded_for_what_it_is(device: CpuDevice) -> None:
    trial = device.trial((4, 4))
    assert (trial.outcome, trial.fault) == ("error", "measurement")
    assert trial.message == "micro-batch 4: its process left with exit status 7"
    assert trial.seconds > 0


def test_a_crash_may_be_out_of_memory(device: CpuDevice) -> None:
    trial = device.trial((13, 13))
    assert (trial.outcome, trial.is_definite_oom, trial.fault, trial.peak_reserved_bytes) == ("oom", False, None, None)
    assert trial.message == "micro-batch 13: its process was ended by SIGSEGV"


def test_a_copy_that_the_workload_forks_does_not_answer(device: CpuDevice) -> None:
    trials = [device.trial((12, 12), fresh=True), device.trial((1, 1))]
    assert [(trial.outcome, trial.message) for trial in trials] == [("ok", None)] * 2


def test_shared_memory_beyond_the_budget_counts_though_no_limit_stops_it(device: CpuDevice) -> None:
    trial = device.trial((9,))
    assert trial.outcome == "oom"
    assert trial.message is not None
    assert "shared memory" in trial.message


def test_a_check_that_hangs_is_ended_in_time(write_workload: Any) -> None:
    hanging = MISBEHAVING.replace('print("a loss of", len(batch[0]))', "time.sleep(60)")
    settings = make_settings(write_workload(hanging), 20, 40 * MIB)
    with CpuDevice(settings) as device, pytest.raises(NotMeasuredError) as seen:
        device.inspect(limit_seconds=1.0)
    assert str(seen.value) == (
        "an update from a small batch took longer than 1 s, and was ended:"
        " look for what does not end there, or raise --time-limit or --trial-limit"
    )


def test_a_device_with_room_for_one_sample_is_inspected_with_one(write_workload: Any) -> None:
    lines = """
    def loss(model, batch):
        if torch.is_grad_enabled() and len(batch[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nn.functional.mse_loss(model(batch[0]), batch[1])
    """
    file = LINEAR_FILE.replace("criterion = nn.MSELoss()", dedent(lines))
    settings = make_settings(write_workload(file), 4, 40 * MIB)
    with CpuDevice(settings) as device:
        assert device.inspect().update_samples == 1
    settings = dataclasses.replace(settings, options=settings.options.with_spec(multiple_of=2))
    with CpuDevice(settings) as device, pytest.raises(DoesNotFitError):
        device.inspect()
