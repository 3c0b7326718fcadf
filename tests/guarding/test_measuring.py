"""A case on a simulated card has the numbers of its plan, even where the schedule no longer fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_process_tracer import InProcessTracer
from planned import make_plan_setup, make_request, simulated_card
from synthetic_traces import Sizes, SyntheticTracer, linear

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.errors import DoesNotFitError, NotMeasuredError
from autoaccum.guarding import measuring
from autoaccum.guarding.cases import make_case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.guarding.measuring import measure, measure_simulated, request_of
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource
from autoaccum.units import GIB, MIB


def make_subject(tracer: SyntheticTracer, request: PlanRequest, gib: float) -> PlanSetup:
    return make_plan_setup(simulated_card(tracer, request.rank_samples, int(gib * GIB)))


def measure_traces(
    tracer: SyntheticTracer,
    micro_batches: tuple[int, ...] | None = None,
    *,
    target: int = 256,
    gib: float = 2.0,
    **asked: Any,
) -> Measurement:
    request = make_request(target, **asked)
    with (subject := make_subject(tracer, request, gib)).device:
        return measure_simulated(subject, request, micro_batches)[0]


def plan_traces(target: int = 256, gib: float = 2.0, **asked: Any) -> Plan:
    request = make_request(target, **asked)
    with (subject := make_subject(SyntheticTracer(), request, gib)).device:
        return plan_on_device(subject, request)


@pytest.mark.parametrize(("target", "gib"), [(256, 2.0), (251, 5.0), (64, 20.0), (5, 20.0), (1, 20.0)])
def test_the_figures_are_the_plans_whether_it_is_planned_or_given(target: int, gib: float) -> None:
    found, plan = measure_traces(SyntheticTracer(), target=target, gib=gib), plan_traces(target, gib)
    assert (found.micro_batches, found.largest, found.capped) == (plan.micro_batches, plan.largest_fit, plan.capped)
    assert (found.peak_bytes, found.min_budget_bytes, found.limit_bytes) == (
        plan.peak_bytes,
        plan.min_budget_bytes,
        plan.limit_bytes,
    )
    assert found.fits
    assert measure_traces(SyntheticTracer(), plan.micro_batches, target=target, gib=gib) == found


def test_the_breakdown_adds_up_and_takes_few_traces() -> None:
    measured = measure_traces(tracer := SyntheticTracer())
    assert 0 < measured.held_bytes <= measured.peak_bytes
    assert measured.card == "NVIDIA GeForce RTX 3090"
    assert set(measured.environment) == {"torch", "autoaccum"}
    assert len(tracer.traced) <= 5


def test_a_schedule_that_fits_no_more_has_its_figures_all_the_same() -> None:
    before = measure_traces(SyntheticTracer())
    now = measure_traces(SyntheticTracer(linear(8 * MIB)), before.micro_batches)
    assert now.micro_batches == before.micro_batches
    assert before.fits
    assert not now.fits
    assert 0 < now.largest < before.largest
    assert now.min_budget_bytes is not None
    assert now.min_budget_bytes > now.limit_bytes
    assert now.peak_bytes > before.peak_bytes


def traced_otherwise(other: Callable[[int], Sizes | None]) -> SyntheticTracer:
    """One that tells other activations of (64,) by how often it was asked for it: `other(2)` is of the second time."""
    tracer = SyntheticTracer(linear(4 * MIB))
    tracer._change = lambda parts: other(tracer.traced.count(parts)) if parts == (64,) else None
    return tracer


@pytest.mark.parametrize(
    ("other", "took"),
    [
        (lambda count: linear((4 + count) * MIB), r"other memory \([\d.]+ GiB, then [\d.]+ GiB\)"),
        (lambda count: lambda size: 4 * MIB * size + count, "the same memory in other pieces"),
    ],
    ids=["more", "as much"],
)
@pytest.mark.parametrize("given", [(64,), None], ids=["given", "planned"])
def test_what_differs_from_trace_to_trace_is_not_measured(
    given: tuple[int, ...] | None, other: Callable[[int], Sizes | None], took: str
) -> None:
    """A random width, or code that does another thing each time, is neither locked nor judged."""
    with pytest.raises(NotMeasuredError, match=f"traced twice, took {took}") as told:
        measure_traces(traced_otherwise(other), given, target=64, gib=20.0)
    assert told.value.hint == "seed what is random, and keep nothing from call to call"


def test_without_a_target_two_of_the_size_are_an_update() -> None:
    request = request_of(make_case(workload="model.py", gpu="rtx3090", micro_batch=32))
    assert request.schedule(32).micro_batches == (32, 32)
    assert request.cap == 32
    request = request_of(make_case(workload="model.py", gpu="rtx3090", micro_batch=32, target_batch=100))
    assert request.schedule(32).micro_batches == (25, 25, 25, 25)
    request = request_of(make_case(workload="model.py", gpu="rtx3090", micro_batch=32, world_size=4))
    assert (request.target_batch, request.rank_samples) == (256, 64)


def test_a_size_that_is_requested_and_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = make_case(workload="model.py", gpu="rtx3090", micro_batch=1000)
    subject = make_subject(SyntheticTracer(), request_of(case), 2.0)
    monkeypatch.setattr(measuring, "make_setup", lambda *asked, **verb: subject)
    with pytest.raises(DoesNotFitError) as told:
        measure(case, ImportPaths.of(tmp_path))
    assert re.fullmatch(
        r"micro-batch 1000 does not fit: it needs at least \d[\d.]+ GiB, 2\.00 GiB are available", told.value.message
    )
    assert re.fullmatch(
        r"take [1-9]\d*, the largest that fits, or give no size to have it planned", told.value.hint or ""
    )


READING = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
def batch(size):
    return torch.randn(size, 8), torch.randint(0, 4, (size,))
def loss(model, batch):
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]) + outputs[outputs.argmax(1) == batch[1]].square().sum()
"""


@pytest.mark.slow
def test_a_case_that_reads_values_has_the_same_figures_each_time(tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(READING)
    case = make_case(workload=str(path), gpu="rtx3090", values="cpu", target_batch=48, micro_batch=16)
    request, card, found = request_of(case), find_card("rtx3090"), []
    settings = TrialSettings(source=FileSource(str(path)), rank_samples=request.rank_samples, options=case.options)
    for _ in range(2):
        traces = TraceCache(partial(InProcessTracer, settings, card), request.rank_samples)
        device = SimulatedDevice(card, traces, torch_version=read_torch_release(), environment={})
        with device:
            found.append(measure_simulated(make_plan_setup(device, str(path)), request, None)[0])
    assert found[0] == found[1]
    assert found[0].micro_batches == (16, 16, 16)
