"""The savers that a plan chooses are the least that fit: by trying all, and by training within the limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import make_request, make_settings
from in_process_tracer import InProcessTracer
from warm_children import WarmPython

import autoaccum
from autoaccum.devices.child.process import child_environment
from autoaccum.devices.cpu import CpuDevice
from autoaccum.devices.environment import read_torch_release
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.units import GIB, MemorySize

WORKLOADS = Path(__file__).parents[1] / "shared" / "workloads" / "long_gpt.py"
TIGHTNESS = 0.85
"""The budget of a card of 24 GiB, of what one sample takes on it without savers."""
LAYERS = 24


class Tracer(InProcessTracer):
    """One for several devices, which keeps its traces."""

    def close(self) -> None:
        """Leave it to `end`."""

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    made = Tracer(make_settings(f"{WORKLOADS}:card", 2), find_card("rtx3090"))
    yield made
    made.end()


def device_of(tracer: Tracer, memory_bytes: int | None) -> SimulatedDevice:
    memory = None if memory_bytes is None else MemorySize(bytes=memory_bytes)
    card, release = find_card("rtx3090"), read_torch_release()
    return SimulatedDevice(card, lambda: tracer, share=2, torch_version=release, memory=memory, environment={})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_few_blocks_are_recomputed_as_fit_by_trying_all_numbers_of_them(tracer: Tracer) -> None:
    """Of a card of 24 GiB, on which not one sample fits without, and of two smaller budgets."""
    budgets = {None: 0, 21 * GIB: 0, 19 * GIB: 0}
    for count in reversed(range(LAYERS + 1)):
        for memory in budgets:
            with device_of(tracer, memory) as device:
                device.use_savers((f"recompute={count}",) if count else ())
                trial = device.trial((1, 1), fresh=True)
                if trial.ran:
                    budgets[memory] = count
                elif count == 0 and memory is None:
                    assert trial.peak_reserved_bytes is not None
                    assert device.limit_bytes / trial.peak_reserved_bytes == pytest.approx(TIGHTNESS, abs=0.01)
    assert 0 < budgets[None] < budgets[21 * GIB] < budgets[19 * GIB] < LAYERS
    for memory, least in budgets.items():
        with device_of(tracer, memory) as device:
            request = make_request(2, gpu="rtx3090", savers="auto")
            plan = plan_on_device(PlanSetup(device, "long_gpt", isolated=False), request)
        assert plan.workload["savers"] == [f"recompute={least}"]
        assert (plan.micro_batch, plan.iter_size) == (1, 2)


TRAIN = """
import json, sys
import torch
from autoaccum import Accumulator
from autoaccum.devices.host_memory import data_limit, read_process_memory
from autoaccum.devices.meters import warm_up
from autoaccum.errors import AutoaccumError
from autoaccum.workload.loading import load_workload

reference, savers, budget, file = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
warm_up()
workload = load_workload(reference)
limit = read_process_memory().data_bytes + budget if budget else None
with data_limit(limit):
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    accumulator = Accumulator(model, optimizer, workload.objective, micro_batch=1, savers=savers, recover=False)
    for _ in range(2):
        accumulator.step(workload.build_batch(3))
torch.save(model.state_dict(), file)
"""


@pytest.mark.usefixtures("warm_children")
def test_a_model_of_which_not_one_sample_fits_trains_to_the_same_weights(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """On the CPU, in float64, within a limit that the kernel holds it to, as tight as that of the card."""
    reference = f"{WORKLOADS}:sister"
    with CpuDevice(make_settings(reference, 3)) as device:
        free = device.trial((1, 1), spare=False).peak_reserved_bytes
    assert free is not None
    budget = int(TIGHTNESS * free)
    asked: dict[str, Any] = {"target_batch": 3, "device": "cpu", "memory": f"{budget}B"}
    plan = autoaccum.plan(reference, savers="auto", **asked)
    savers = plan.workload["savers"]
    print(savers, free / 2**20, plan.peak_bytes / 2**20)

    def train(name: str, words: list[str], budget: int) -> Any:
        given = reference, autoaccum.planning.plan_record.json.dumps(words), str(budget), str(tmp_path / name)
        return warm_python(tmp_path, "-c", TRAIN, *given, environment=child_environment(), measured=True)

    refused = train("none.pt", [], budget)
    assert refused.returncode == 1
    assert "can't allocate memory" in refused.stderr
    for name, words, limit in (("free.pt", [], 0), ("held.pt", savers, budget)):
        done = train(name, words, limit)
        assert done.returncode == 0, done.stderr
    held, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("held.pt", "free.pt"))
    torch.testing.assert_close(held, expected, rtol=1e-10, atol=1e-10)
