"""The simulated device over traces made by hand: budgets, outcomes, and how few traces it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from factories import codes
from synthetic_traces import LAYERS, SyntheticTracer, linear

from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import Message
from autoaccum.simulation.cards import Card, context_memory, find_card
from autoaccum.units import GIB, MIB, MemorySize

CARD = find_card("rtx3090")


def device(tracer: SyntheticTracer | None = None, *, card: Card = CARD, rank_samples: int = 256, **options: Any) -> Any:
    options = {"memory": MemorySize(bytes=2 * GIB), "environment": {}, **options}
    made = tracer or SyntheticTracer()
    return SimulatedDevice(card, TraceCache(lambda: made, rank_samples), torch_version=(2, 13), **options)


# --- the budget -----------------------------------------------------------------------------------------------------


def test_the_budget_is_what_the_context_leaves_less_the_headroom() -> None:
    free = CARD.total_bytes - context_memory(CARD).bytes
    assert device(memory=None).limit_bytes == free - int(0.02 * free)
    assert device(memory=None, reserve=MemorySize(bytes=GIB)).limit_bytes == free - GIB
    assert device(memory=MemorySize(fraction=0.5)).limit_bytes == CARD.total_bytes // 2
    assert device(memory=MemorySize(bytes=10 * GIB), reserve=MemorySize(bytes=GIB)).limit_bytes == 9 * GIB


def test_more_than_the_card_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"more than the .* that rtx3090 \(simulated, .* for its context\) has free"):
        device(memory=MemorySize(bytes=30 * GIB))


# --- the outcome ----------------------------------------------------------------------------------------------------


def test_a_trial_that_fits() -> None:
    trial = device().trial((8, 8))
    assert (trial.outcome, trial.phase, trial.message) == ("ok", None, None)
    # Weights, two states and gradients, what four layers keep, and what one passes back.
    held = 16 * 25 * MIB + (LAYERS + 1) * linear()(8)
    assert held <= trial.peak_allocated_bytes <= trial.peak_reserved_bytes <= held + 100 * MIB
    assert trial.allocator_retries == 0
    assert trial.seconds > 0


def test_a_trial_that_does_not_says_where_and_what_it_would_take() -> None:
    trial = device().trial((200, 200))
    assert (trial.outcome, trial.ran, trial.is_definite_oom, trial.fault) == ("oom", False, True, None)
    assert trial.phase in ("forward", "backward")
    assert trial.peak_reserved_bytes > 5 * GIB
    assert trial.message.startswith(f"micro-batch 200 does not fit: {trial.phase} requests 1.2 GiB more; without a")


def test_what_is_least_is_enough_and_less_is_not() -> None:
    made = device()
    prediction = made.predict((30, 29))
    for limit_bytes in (prediction.min_budget_bytes, prediction.min_budget_bytes - 4 * MIB):
        limited = device(memory=MemorySize(bytes=limit_bytes))
        assert limited.trial((30, 29)).ran is (limit_bytes == prediction.min_budget_bytes)
    assert prediction.min_budget_bytes <= made.trial((30, 29)).peak_reserved_bytes


def test_a_trial_of_many_parts_is_that_of_each_two_that_follow_each_other() -> None:
    tracer = SyntheticTracer(linear(30 * MIB))
    made = device(tracer)
    trial = made.trial((9, 9, 8), fresh=True)
    assert (trial.parts, trial.fresh, trial.outcome) == ((9, 9, 8), True, "ok")
    assert tracer.traced.count((9, 8)) == 1
    assert (9, 9) not in tracer.traced
    alike, unlike = made.trial((9, 9)), made.trial((9, 8))
    assert trial.peak_allocated_bytes == alike.peak_allocated_bytes > unlike.peak_allocated_bytes
    assert made.predict((9, 9, 8)).min_budget_bytes >= made.predict((9, 9)).min_budget_bytes


# --- how many traces ------------------------------------------------------------------------------------------------


def test_any_size_follows_from_three_small_ones() -> None:
    tracer = SyntheticTracer()
    made = device(tracer)
    for size in (100, 7, 33, 64):
        assert not made.trial((size, size)).fresh
    assert sorted(tracer.traced) == [(2, 2), (3, 3), (5, 5)]
    assert made.trial((2, 2), fresh=True).fresh
    assert len(tracer.traced) == 3


@pytest.mark.parametrize("parts", [(1, 1), (256,), (86, 85), (9, 1)])
def test_other_parts_are_traced_by_themselves(parts: tuple[int, ...]) -> None:
    tracer = SyntheticTracer()
    trial = device(tracer).trial(parts)
    assert (trial.parts, trial.fresh, tracer.traced) == (parts, True, [parts])
    assert not device(SyntheticTracer(linear(0, 1))).predict(parts).warnings


def squares(size: int) -> int:
    return 100_000 * size * size


def test_sizes_that_are_not_affine_are_traced_one_by_one() -> None:
    tracer = SyntheticTracer(squares)
    made = device(tracer)
    trial = made.trial((20, 20))
    assert trial.fresh
    assert trial.peak_allocated_bytes == pytest.approx(16 * 25 * MIB + (LAYERS + 1) * squares(20), rel=0.03)
    assert (20, 20) in tracer.traced
    expected = made.forecast().peak_bytes
    assert expected is not None
    peaks = [expected(size) or 0 for size in (5, 20, 35)]  # On the line through the largest two that were traced.
    assert peaks[1] == trial.peak_reserved_bytes
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0
    prediction = made.predict((20, 20))
    assert codes(prediction.notes) == ["predicted", "not_extrapolated", "uncertainty"]
    assert codes(prediction.warnings) == ["compares_samples"]
    assert made.predict((20,)).warnings == ()


def test_a_trace_that_is_not_what_followed_is_believed() -> None:
    tracer = SyntheticTracer(change=lambda parts: linear(12 * MIB) if max(parts) > 20 else None)
    made = device(tracer)
    promised = made.trial((30, 30))
    traced = made.trial((30, 30), fresh=True)
    assert traced.peak_reserved_bytes > promised.peak_reserved_bytes
    assert made.trial((40, 40)).fresh
    assert made.predict((8, 8)).warnings == (Message("trace_differs", {"parts": [30, 30], "sizes": [2, 3, 5]}),)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def failing(error: Exception, size: int = 7) -> SyntheticTracer:
    return SyntheticTracer(change=lambda parts: error if size in parts else None)


def test_an_error_of_the_users_is_theirs_and_does_no_harm() -> None:
    tracer = failing(WorkloadError("micro-batch 7, forward raised ValueError: seven", user_traceback="in loss"))
    made = device(tracer)
    trial = made.trial((7, 1))
    assert (trial.outcome, trial.fault, trial.traceback) == ("error", "user", "in loss")
    assert trial.message == "micro-batch 7, forward raised ValueError: seven"
    assert tracer.closed == 1
    assert made.trial((1, 1)).outcome == "ok"


@pytest.mark.parametrize(
    ("kind", "limit_seconds"), [(NotMeasuredError, 60.0), (DoesNotFitError, 60.0), (NotMeasuredError, 1e-9)]
)
def test_a_tracer_that_dies_is_no_answer(kind: Callable[[str], Exception], limit_seconds: float) -> None:
    trial = device(failing(kind("its process was ended"))).trial((7,), limit_seconds=limit_seconds)
    assert (trial.outcome, trial.fault, trial.timed_out) == ("error", "measurement", limit_seconds < 1)
    assert trial.message.startswith("its process was ended")


# --- the band -------------------------------------------------------------------------------------------------------


def test_a_schedule_within_the_band_of_the_budget_is_warned_of() -> None:
    made = device()
    least = made.predict((30, 30)).min_budget_bytes
    close = device(memory=MemorySize(bytes=least + 10 * MIB)).predict((30, 30))
    assert close.min_budget_bytes == least
    (warning,) = close.warnings
    assert warning.code == "narrow_fit"
    assert (warning.facts["room_bytes"], warning.facts["reserve"]) == (10 * MIB, "100MiB")


def test_parts_are_traced_in_threes_where_gradients_wait_for_the_last() -> None:
    made = device(tracer := SyntheticTracer())
    made.trial((30, 30, 30, 29))
    made.use_grad_sync("last")
    made.trial((30, 30, 30, 29))
    assert {(30, 30, 30), (30, 30, 29)} <= set(tracer.traced)
