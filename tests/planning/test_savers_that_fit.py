"""The savers that a plan chooses are the least that fit, by training within the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import codes
from planned import make_settings
from warm_children import WarmPython

import autoaccum
from autoaccum.devices.child.process import child_environment
from autoaccum.devices.cpu import CpuDevice

WORKLOAD = Path(__file__).parents[1] / "shared" / "workloads" / "long_gpt.py"
TIGHTNESS = 0.85
"""The budget of an RTX 3090, 22.8 GiB, as a share of the 26.7 GiB that micro-batches of one sample take on it."""


TRAIN = """
import contextlib, gc, json, sys
import torch
import torch._dynamo  # As torch.utils.checkpoint does: it is not the model's memory.
from autoaccum import Accumulator
from autoaccum.devices.host_memory import data_limit, read_process_memory
from autoaccum.devices.meters import warm_up
from autoaccum.sources.source import FileSource

reference, savers, budget = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
warm_up()
workload = FileSource(reference).load()
limit = read_process_memory().data_bytes + budget

def train(savers, limit):
    with data_limit(limit) if limit else contextlib.nullcontext():
        torch.manual_seed(0)
        model = workload.build_model()
        optimizer = workload.build_optimizer(model)
        accumulator = Accumulator(model, optimizer, workload.objective, micro_batch=1, savers=savers, recover=False)
        for _ in range(2):
            accumulator.step(workload.build_batch(3))
    return model.state_dict()

torch.save(train(savers, limit), "held.pt")
gc.collect()
try:
    train(["recompute=1"], limit)
except Exception as error:
    print("refused:", error)
torch.save(train([], None), "free.pt")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_a_model_of_which_not_one_sample_fits_trains_to_the_same_weights(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """On the CPU, in float64, within a limit that the kernel holds it to, as tight as that of the card."""
    reference = str(WORKLOAD)
    with CpuDevice(make_settings(reference, 3)) as device:
        free = device.trial((1, 1)).peak_reserved_bytes
    assert free is not None
    budget = int(TIGHTNESS * free)
    asked: dict[str, Any] = {"target_batch": 3, "device": "cpu", "memory": f"{budget}B"}
    plan = autoaccum.plan(reference, savers="auto", **asked)
    savers = plan.spec.savers
    assert savers == ("recompute=2",)
    assert "savers_chosen" in codes(plan.notes)
    assert plan.peak_bytes is not None
    assert plan.peak_bytes <= budget

    given = reference, json.dumps(savers), str(budget)
    done = warm_python(tmp_path, "-c", TRAIN, *given, environment=child_environment(), measured=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: ")
    assert "can't allocate memory" in done.stdout
    held, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("held.pt", "free.pt"))
    torch.testing.assert_close(held, expected, rtol=1e-10, atol=1e-10)
