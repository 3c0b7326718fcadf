"""The savers that a plan chooses are the least that fit: by trying all, and by training within the limit."""

from __future__ import annotations

import json
import subprocess
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
from autoaccum.devices.simulated.allocator.replay import Replayer
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.units import GIB, MemorySize

WORKLOADS = Path(__file__).parents[1] / "shared" / "workloads" / "long_gpt.py"
TIGHTNESS = 0.85
"""The budget of an RTX 3090, 22.8 GiB, as a share of the 26.7 GiB that micro-batches of one sample take on it."""
LAYERS = 24


class Tracer(InProcessTracer):
    """One for several devices, which keeps its traces."""

    def close(self) -> None:
        """Leave it to `end`."""

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    made = Tracer(make_settings(f"{WORKLOADS}:card", 1), find_card("rtx3090"))
    yield made
    made.end()


def device_of(tracer: Tracer, memory_bytes: int | None) -> SimulatedDevice:
    memory = None if memory_bytes is None else MemorySize(bytes=memory_bytes)
    card, release = find_card("rtx3090"), read_torch_release()
    return SimulatedDevice(card, lambda: tracer, share=1, torch_version=release, memory=memory, environment={})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_few_blocks_are_recomputed_as_fit_by_trying_all_numbers_of_them(tracer: Tracer) -> None:
    """Of a card of 24 GiB, on which not one sample fits without, and of two smaller budgets."""
    with device_of(tracer, None) as device:
        limits = (device.limit_bytes, 21 * GIB, 20 * GIB)
    card = find_card("rtx3090")
    replayer = Replayer(card, AllocatorSettings().for_card(card.total_bytes), read_torch_release())
    fitting: dict[int, list[int]] = {limit: [] for limit in limits}
    for count in range(LAYERS + 1):
        trace = tracer.call(TraceParts(parts=(1,), savers=(f"recompute={count}",) if count else ()))
        for limit in limits:
            fitting[limit] += [count] if replayer.update([trace], limit).ran else []
    least = [min(fitting[limit]) for limit in limits]
    assert 0 < least[0] < least[1] < least[2] < LAYERS
    for limit, count in zip(limits, least, strict=True):
        with device_of(tracer, limit) as device:
            request = make_request(1, gpu="rtx3090", savers="auto")
            plan = plan_on_device(PlanSetup(device, "long_gpt", isolated=False), request)
        assert plan.workload["savers"] == (f"recompute={count}",)


TRAIN = """
import json, sys
import torch
import torch._dynamo  # As torch.utils.checkpoint does: it is not the model's memory.
from autoaccum import Accumulator
from autoaccum.devices.host_memory import data_limit, read_process_memory
from autoaccum.devices.meters import warm_up
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


@pytest.mark.slow
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
    assert savers
    assert plan.peak_bytes is not None
    assert plan.peak_bytes <= budget

    def train(name: str, savers: list[str], limit: int) -> subprocess.CompletedProcess[str]:
        given = reference, json.dumps(savers), str(limit), str(tmp_path / name)
        return warm_python(tmp_path, "-c", TRAIN, *given, environment=child_environment(), measured=True)

    refused = train("none.pt", [], budget)
    assert refused.returncode == 1
    assert "can't allocate memory" in refused.stderr
    for name, words, limit in (("free.pt", [], 0), ("held.pt", savers, budget)):
        done = train(name, words, limit)
        assert done.returncode == 0, done.stderr
    held, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("held.pt", "free.pt"))
    torch.testing.assert_close(held, expected, rtol=1e-10, atol=1e-10)
