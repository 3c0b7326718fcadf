"""A standby process imports PyTorch for the next fresh trial, if there is room for it, and ends with the device."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from planned import LINEAR_FILE, make_settings
from warm_children import Nurseries, warmed

from autoaccum.devices import child_device
from autoaccum.devices.cpu import CpuDevice
from autoaccum.units import MIB

WORKLOAD = f"""{LINEAR_FILE}
def loss(model, batch):
    time.sleep(60 if len(batch[0]) == 5 else 0)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

del criterion
"""


def children_of_this_process() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {int(child) for task in tasks for child in task.joinpath("children").read_text().split()}


@pytest.mark.slow
def test_a_fresh_trial_runs_in_the_standby_process_for_which_there_has_to_be_room(
    write_workload: Any, monkeypatch: pytest.MonkeyPatch, nurseries: Nurseries
) -> None:
    monkeypatch.setattr(CpuDevice, "_copies", False)  # As on a card.
    _ = nurseries[True]  # It is a child of this process, too.
    before = children_of_this_process()
    with warmed(nurseries.__getitem__), CpuDevice(make_settings(write_workload(WORKLOAD), 8, 40 * MIB)) as device:
        with monkeypatch.context() as patched:
            patched.setattr(child_device, "_STANDBY_BYTES", 2**60)
            assert device.trial((1, 1)).fresh
            assert len(children_of_this_process() - before) == 1, "no room for another"
        device.trial((1, 1))
        assert device._standby is not None
        standby = device._standby.pid
        assert device.trial((1, 1), fresh=True).fresh
        assert not device.trial((1, 1)).fresh
        assert device._child is not None
        assert device._child.pid == standby
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            device.trial((5, 5))
    assert children_of_this_process() == before
