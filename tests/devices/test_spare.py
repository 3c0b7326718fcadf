from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import make_settings

from autoaccum.devices import child_device
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.process import ChildProcess
from autoaccum.units import MIB

LOADED = "loaded.txt"
WORKLOAD = f"""
    import os, time
    from pathlib import Path
    import torch
    from torch import nn

    with Path(__file__).with_name("{LOADED}").open("a") as file:
        print(os.getpid(), file=file)

    def model():
        return nn.Linear(8, 8)

    def batch(size):
        return torch.randn(size, 8), torch.randn(size, 8)

    def loss(model, batch):
        if len(batch[0]) == 5:
            time.sleep(60)
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture(scope="module")
def settings(write_workload: Any) -> TrialSettings:
    return make_settings(write_workload(WORKLOAD), 8, 40 * MIB)


@pytest.fixture(scope="module")
def device(settings: TrialSettings) -> Iterator[CpuDevice]:
    with CpuDevice(settings) as made:
        yield made


def loads(settings: TrialSettings) -> list[str]:
    return Path(settings.reference).with_name(LOADED).read_text().splitlines()


def spare_of(device: CpuDevice) -> ChildProcess:
    assert device._spare is not None
    return device._spare


def children_of(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in task.joinpath("children").read_text().split()}


def wait_until(condition: Any) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_a_fresh_trial_runs_in_the_spare_which_is_replaced(device: CpuDevice, settings: TrialSettings) -> None:
    assert device.trial((1, 1)).fresh
    first = spare_of(device).pid
    assert device.trial((1, 1), fresh=True).fresh
    assert loads(settings)[-1] == str(first)
    second = spare_of(device).pid
    assert second != first
    assert {first, second} <= children_of(os.getpid())


def test_the_spare_imports_and_waits_without_loading_the_workload_or_starting_threads(
    device: CpuDevice, settings: TrialSettings
) -> None:
    device.trial((1, 1))
    spare = spare_of(device).pid

    def is_ready() -> bool:  # blocked in the read of its pipe, with PyTorch's libraries mapped
        has_torch = "libtorch_cpu" in Path(f"/proc/{spare}/maps").read_text()
        return has_torch and Path(f"/proc/{spare}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    assert wait_until(is_ready)
    assert str(spare) not in loads(settings)


def test_there_is_none_before_the_budget_is_read_nor_without_room_nor_after_closing(
    settings: TrialSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children_of(os.getpid())
    with CpuDevice(settings) as device:
        assert device.limit_bytes == 40 * MIB
        assert device._spare is None
        with monkeypatch.context() as patched:
            patched.setattr(child_device, "_SPARE_BYTES", 2**60)
            assert device.trial((1, 1)).outcome == "ok"
            assert device._spare is None
        device.trial((1, 1))
        assert len(children_of(os.getpid()) - before) == 2
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            device.trial((5, 5))
        assert spare_of(device).pid in children_of(os.getpid())
    assert device._spare is None
    assert children_of(os.getpid()) == before
