"""The installed card, simulated: forecasts of peaks and explanations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from synthetic_traces import SyntheticTracer, linear

from autoaccum.devices.base import Forecast, TrialSettings
from autoaccum.devices.child.requests import Request
from autoaccum.devices.cuda import CudaDevice, InstalledCard
from autoaccum.devices.explanation import MemoryReport
from autoaccum.devices.simulated.simulation_requests import Tracer
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import LabelledTrace
from autoaccum.sources.source import FileSource
from autoaccum.units import GIB, MIB

CARD = InstalledCard(
    index=0,
    name="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    reserved_bytes=0,
    capability=(8, 6),
    multiprocessors=82,
    context_bytes=333 * MIB,
)


class SyntheticCard(CudaDevice):
    """A card that has told its memory, and whose simulation is a synthetic tracer."""

    def __init__(self, tracer: SyntheticTracer, rank_samples: int = 64) -> None:
        super().__init__(TrialSettings(source=FileSource("model.py"), rank_samples=rank_samples))
        self._limit_bytes, self._card, self._tracer = 2 * GIB, CARD, tracer

    def _use_child(self, *, fresh: bool = False) -> Any:
        return None

    def _make_tracer(self, card: Card) -> Tracer:
        return self._tracer


def explain(tracer: SyntheticTracer) -> MemoryReport:
    return SyntheticCard(tracer).explain((20, 20), changes=True, curve=True)


def forecast_peaks(tracer: SyntheticTracer, limit_seconds: float | None = None) -> Forecast:
    return SyntheticCard(tracer, 256).forecast(limit_seconds=limit_seconds)


def test_an_explanation_of_the_installed_card_is_called_simulated() -> None:
    tracer = SyntheticTracer(suggestions={"half": linear(sample=3 * MIB)})
    found = explain(tracer)
    assert found.explanation.card == "NVIDIA GeForce RTX 3090 (simulated)"
    assert found.explanation.parts == (20, 20)
    assert found.explanation.context_bytes == 333 * MIB
    assert [change.name for change in found.explanation.changes] == ["half", "expandable_segments"]
    assert found.curve
    assert tracer.closed == 1


def test_a_card_that_cannot_be_simulated_is_an_error_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = SyntheticTracer(change=lambda parts: NotMeasuredError("its process died"))
    with pytest.raises(NotMeasuredError, match="its process died"):
        explain(tracer)
    assert tracer.closed
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with pytest.raises(UsageError, match="backend:cudaMallocAsync, which is not simulated"):
        explain(SyntheticTracer())


def test_checkpointing_is_not_suggested_to_a_checkpointed_model() -> None:
    class Recomputing(SyntheticTracer):
        def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
            reply = super().call(request, limit_seconds)
            if isinstance(reply, LabelledTrace):
                return replace(reply, origins=(*reply.origins[:-1], reply.origins[-1]._replace(role="recomputed")))
            return reply

    for tracer, names in (
        (SyntheticTracer, {"expandable_segments", "checkpoint"}),
        (Recomputing, {"expandable_segments"}),
    ):
        changes = explain(tracer(suggestions={"checkpoint": linear()})).explanation.changes
        assert {change.name for change in changes} == names


@pytest.mark.usefixtures("warm_children")
def test_a_card_is_explained_in_another_process(write_workload: Callable[[str], str]) -> None:
    workload = write_workload("""
        import torch
        from torch import nn

        def model():
            return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))

        def batch(size):
            print("this is not shown")
            return torch.randn(size, 256), torch.randint(0, 10, (size,))

        criterion = nn.CrossEntropyLoss()
    """)
    device = CudaDevice(TrialSettings(source=FileSource(workload), rank_samples=64))
    assert device.explains
    device._limit_bytes, device._card = 2 * GIB, CARD  # As its first process would report.
    found = device.explain((16, 16), changes=False)
    assert found.explanation.card == "NVIDIA GeForce RTX 3090 (simulated)"
    assert found.explanation.categories["parameters"] >= 4 * (256 * 1024 + 1024 * 10)
    assert (found.explanation.changes, found.curve, found.notes) == ((), (), ())


def test_peaks_of_any_size_from_three_traces() -> None:
    tracer = SyntheticTracer()
    forecast = forecast_peaks(tracer)
    assert forecast.peak_bytes is not None
    assert forecast.notes == ()
    small, large = forecast.peak_bytes(10) or 0, forecast.peak_bytes(100) or 0
    assert 500 * MIB < small < large < 5 * GIB
    assert (len(tracer.traced), tracer.closed) == (3, 1)


@pytest.mark.parametrize(
    ("tracer", "why"),
    [
        (SyntheticTracer(change=lambda parts: WorkloadError("it asks for .item()\nin line 3")), "it asks for .item"),
        (SyntheticTracer(change=lambda parts: NotMeasuredError("its process died")), "its process died"),
        (SyntheticTracer(lambda size: 100_000 * size * size), ""),
    ],
)
def test_a_card_that_cannot_be_simulated_gives_a_note(tracer: SyntheticTracer, why: str) -> None:
    forecast = forecast_peaks(tracer)
    assert forecast.peak_bytes is None
    assert tracer.closed
    (note,) = forecast.notes
    assert note.code == "not_simulated"
    assert note.facts["error"].startswith(why)
    assert "\n" not in note.facts["error"]


@pytest.mark.parametrize(("limit", "most"), [(None, 60), (10.0, 10), (500.0, 60)])
def test_the_traces_have_a_limit_on_time(limit: float | None, most: int) -> None:
    tracer = SyntheticTracer()
    forecast_peaks(tracer, limit)
    assert all(seconds is not None and most - 1 < seconds <= most for seconds in tracer.limits)


def test_an_allocator_that_is_not_simulated_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    tracer = SyntheticTracer()
    assert forecast_peaks(tracer).peak_bytes is None
    assert not tracer.traced
