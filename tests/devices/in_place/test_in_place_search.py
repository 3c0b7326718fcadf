"""Trials in place in processes of their own: a search under a real limit, and a heap that gives back what is freed."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from warm_children import WarmPython

from autoaccum.units import MIB

linux = pytest.mark.skipif(sys.platform != "linux", reason="trials on the CPU need Linux")

SEARCH = """
import json
import torch
from torch import nn
from autoaccum.accumulation.state_hash import state_entries
from autoaccum.devices.in_place import InPlaceDevice, LiveObjects
from autoaccum.options import Options
from autoaccum.planning.search import search
from autoaccum.units import MIB, MemorySize
from autoaccum.workload.objective import resolve_objective

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
                      nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
optimizer = torch.optim.AdamW(model.parameters())
sample = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
objective, options = resolve_objective(nn.CrossEntropyLoss()), Options(optimizer=optimizer)
live = LiveObjects(model=model, batch=sample, objective=objective, options=options)
before = state_entries({"": model}, optimizer)
with InPlaceDevice(live, share=400, memory=MemorySize(bytes=60 * MIB)) as device:
    inspection = device.inspect()
    result = search(
        lambda size, **_: device.trial((size, size)), range(inspection.least_size, 401), limit_bytes=device.limit_bytes,
        grow=device.grow, isolated=False, confirms=False,
    )
print(json.dumps({
    "largest_fit": result.largest_fit, "first_fail": result.first_fail, "capped": result.capped,
    "trials": [(trial.micro_batch, trial.outcome, trial.peak_reserved_bytes) for trial in result.trials],
    "same": state_entries({"": model}, optimizer) == before, "limit": device.limit_bytes,
}))
"""


@linux
@pytest.mark.slow
def test_a_search_ends_on_a_size_that_ran(tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python(tmp_path, "-c", SEARCH, environment=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert not found["capped"]
    ran = {size: peak for size, outcome, peak in found["trials"] if outcome == "ok"}
    failed = [size for size, outcome, _ in found["trials"] if outcome == "oom"]
    assert found["largest_fit"] == max(ran)
    assert found["first_fail"] == found["largest_fit"] + 1
    assert found["first_fail"] in failed
    assert 8 < found["largest_fit"] < 200
    assert all(peak <= found["limit"] for peak in ran.values())
    assert len(found["trials"]) < 16


GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")

glibc = pytest.mark.skipif(not GLIBC, reason="only glibc has these thresholds")

SCRIPT = """
import json
import numpy as np
from autoaccum.devices.in_place.memory_limits import tight_heap, trim_heap
from autoaccum.devices.host_memory import read_process_memory
from autoaccum.units import MIB

def left():
    # What freeing every other one of 64 blocks leaves resident.
    trim_heap()
    before = read_process_memory().anonymous_bytes
    blocks = [np.ones(MIB, dtype=np.uint8) for _ in range(64)]
    kept = blocks[::2]
    del blocks
    return read_process_memory().anonymous_bytes - before - 32 * MIB

with tight_heap():
    within = left()
print(json.dumps([within, left()]))
"""


@pytest.mark.slow
@glibc
def test_what_is_freed_is_given_back_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    within, afterwards = json.loads(done.stdout)
    assert within < 4 * MIB
    assert afterwards > 24 * MIB  # As in any process that has freed large blocks.
