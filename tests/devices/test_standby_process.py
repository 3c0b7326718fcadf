from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from asking import make_settings
from warm_children import Nurseries, warmed

from autoaccum.devices import child_device
from autoaccum.devices.cpu import CpuDevice
from autoaccum.units import MIB

pytestmark = pytest.mark.slow

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


def standby_of(device: CpuDevice) -> int:
    assert device._standby is not None
    return device._standby.pid


def children_of_this_process() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {int(child) for task in tasks for child in task.joinpath("children").read_text().split()}


def test_a_fresh_trial_runs_in_the_standby_process_for_which_there_has_to_be_room(
    write_workload: Any, monkeypatch: pytest.MonkeyPatch, nurseries: Nurseries
) -> None:
    _ = nurseries[True]  # It is a child of this process, too.
    before = children_of_this_process()
    reference = write_workload(WORKLOAD)
    with warmed(nurseries), CpuDevice(make_settings(reference, 8, 40 * MIB)) as device:
        assert device.limit_bytes == 40 * MIB
        assert device._standby is None, "the budget is read before there is one"
        with monkeypatch.context() as patched:
            patched.setattr(child_device, "_STANDBY_BYTES", 2**60)
            assert device.trial((1, 1)).fresh
            assert device._standby is None
        device.trial((1, 1))
        first = standby_of(device)
        assert device.trial((1, 1), fresh=True).fresh
        assert Path(reference).with_name(LOADED).read_text().split()[-1] == str(first)
        assert {first} == children_of_this_process() - before, "such a trial is usually the last"
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            device.trial((5, 5))
        assert standby_of(device) in children_of_this_process()
    assert device._standby is None
    assert children_of_this_process() == before
