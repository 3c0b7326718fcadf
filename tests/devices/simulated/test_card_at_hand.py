"""What a simulation of the card at hand says of trials that will really run: a hint, or nothing."""

from __future__ import annotations

import pytest
from synthetic_traces import SyntheticTracer

from autoaccum.devices.card import CardMemory
from autoaccum.devices.simulated.at_hand import foresee_peaks
from autoaccum.errors import NotMeasuredError, WorkloadError
from autoaccum.units import GIB, MIB

CARD = CardMemory(
    index=0,
    name="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    reserved_bytes=0,
    capability=(8, 6),
    multiprocessors=82,
)


def test_peaks_of_any_size_from_three_traces() -> None:
    tracer = SyntheticTracer()
    foresight = foresee_peaks(CARD, lambda card: tracer, 256)
    assert foresight.peak_bytes is not None
    assert foresight.notes == ()
    assert (len(tracer.asked), tracer.closed) == (3, 1)
    small, large = foresight.peak_bytes(10), foresight.peak_bytes(100)
    assert small is not None
    assert large is not None
    assert 500 * MIB < small < large < 5 * GIB
    assert (len(tracer.asked), tracer.closed) == (3, 1)


@pytest.mark.parametrize(
    ("tracer", "why"),
    [
        (SyntheticTracer(change=lambda parts: WorkloadError("it asks for .item()\nin line 3")), "it asks for .item"),
        (SyntheticTracer(change=lambda parts: NotMeasuredError("its process died")), "its process died"),
        (SyntheticTracer(lambda size: 100_000 * size * size), ""),
    ],
)
def test_what_cannot_be_simulated_is_said_and_no_more(tracer: SyntheticTracer, why: str) -> None:
    foresight = foresee_peaks(CARD, lambda card: tracer, 256)
    assert foresight.peak_bytes is None
    assert tracer.closed
    (note,) = foresight.notes
    assert note.startswith(f"the search began without a simulation of the card ({why}")
    assert "\n" not in note


@pytest.mark.parametrize(("limit", "most"), [(None, 60), (10.0, 10), (500.0, 60)])
def test_the_traces_have_a_limit_on_time(limit: float | None, most: int) -> None:
    tracer = SyntheticTracer()
    foresee_peaks(CARD, lambda card: tracer, 256, limit)
    assert all(seconds is not None and most - 1 < seconds <= most for seconds in tracer.limits)


def test_an_allocator_that_is_not_simulated_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    tracer = SyntheticTracer()
    assert foresee_peaks(CARD, lambda card: tracer, 256).peak_bytes is None
    assert not tracer.asked
