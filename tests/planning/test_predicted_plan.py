"""Plans of a card that is not there, from traces made by hand; and measured ones that a forecast guides."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
from factories import codes
from planned import plan_on, plan_simulated
from scripted_device import ScriptedDevice
from synthetic_traces import INSPECTION, SyntheticTracer, linear, make_trace

from autoaccum.devices.base import ChooseParts, Forecast
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError
from autoaccum.messages import Message
from autoaccum.planning.plan_events import Event, TracedAlone, TrialStarted
from autoaccum.planning.plan_record import Plan
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import SizedTrace
from autoaccum.simulation.trace_records import Trace
from autoaccum.units import GIB, MIB


def predict(tracer: SyntheticTracer | None = None, target: int = 256, *, gib: float = 2.0, **asked: Any) -> Plan:
    return plan_simulated(tracer or SyntheticTracer(), target, int(gib * GIB), **asked)


def test_a_predicted_plan() -> None:
    plan = predict()
    assert plan.kind == "predicted"
    assert sum(plan.micro_batches) == 256
    assert plan.min_budget_bytes is not None
    assert plan.peak_bytes is not None
    assert plan.uncertainty_bytes is not None
    assert plan.min_budget_bytes <= plan.limit_bytes == 2 * GIB
    assert plan.min_budget_bytes <= plan.peak_bytes
    assert plan.uncertainty_bytes > 0
    assert plan.device.kind == "simulated"
    assert set(plan.trials[-1].parts) == {plan.micro_batch, min(plan.micro_batches)}
    assert plan.trials[-1].fresh
    assert "predicted" in codes(plan.notes)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_ceiling_is_the_largest_that_fits_and_the_next_does_not() -> None:
    for gib in (1.0, 2.0, 5.0):
        plan = predict(gib=gib, exact_max=True)
        outcomes = {trial.micro_batch: trial.outcome for trial in plan.trials[:-1]}
        assert outcomes[plan.largest_fit] == "ok"
        assert outcomes[plan.largest_fit + 1] != "ok"


@pytest.mark.parametrize(
    ("target", "gib", "most"), [(256, 2.0, 3), (256, 20.0, 4), (1000, 5.0, 3), (1024, 3.0, 3), (5, 20.0, 4)]
)
def test_a_plan_traces_two_small_sizes_and_its_own_parts(target: int, gib: float, most: int) -> None:
    tracer = SyntheticTracer()
    predict(tracer, target, gib=gib)
    assert len(tracer.traced) <= most
    assert len(set(tracer.traced)) == len(tracer.traced)


@pytest.mark.parametrize("target", [101, 251])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("expandable", [False, True])
def test_the_figures_are_those_of_the_whole_schedule(target: int, world_size: int, expandable: bool) -> None:
    activations = linear(30 * MIB)
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    plan = predict(SyntheticTracer(activations), target, world_size=world_size, environment=environment)
    assert plan.micro_batches[0] == plan.micro_batches[1] > plan.micro_batches[-1]
    trace = make_trace(plan.micro_batches, activations)
    sizes = [size for size in trace.sizes if isinstance(size, int)]
    settings = AllocatorSettings(expandable_segments=expandable)
    sized = SizedTrace(trace, sizes)
    whole = sized.replay(settings)
    assert plan.peak_bytes == whole.peak_reserved_bytes
    assert plan.trials[-1].peak_allocated_bytes == whole.peak_allocated_bytes
    assert plan.min_budget_bytes == sized.least_capacity(settings)


def test_every_size_is_traced_where_memory_is_not_affine_and_that_is_told_before_the_trials() -> None:
    events: list[Event] = []
    plan = predict(SyntheticTracer(lambda size: 100_000 * size * size), on_event=events.append)
    assert all(trial.fresh for trial in plan.trials)
    assert "not_extrapolated" in codes(plan.notes)
    assert plan.trials[-1].outcome == "ok"
    names = [type(event).__name__ for event in events]
    assert names.index("TracedAlone") < names.index("TrialStarted")
    (alone,) = (event for event in events if isinstance(event, TracedAlone))
    assert alone.reason.code == "not_extrapolated"


def test_a_confirmation_that_contradicts_goes_down_and_says_so() -> None:
    plan = predict(SyntheticTracer(change=lambda parts: linear(12 * MIB) if max(parts) > 20 else None))
    assert plan.trials[-1].fresh
    assert plan.trials[-1].outcome == "ok"
    assert "refuted" in codes(plan.warnings)
    assert "trace_differs" in codes(plan.warnings)


def test_where_small_sizes_promise_what_large_ones_do_not_keep_the_search_begins_again_by_traces() -> None:
    """Steps of 8 samples that start above the sizes that are traced first."""

    def padded(size: int) -> int:
        return 6 * MIB * (size if size < 6 else -(-size // 8) * 8)

    tracer = SyntheticTracer(padded)
    plan = predict(tracer, 501, exact_max=True)
    ran = {trial.micro_batch: trial.outcome for trial in plan.trials if trial.fresh}
    assert (ran[plan.largest_fit], ran[plan.largest_fit + 1]) == ("ok", "oom")
    assert plan.largest_fit % 8 == 0
    assert plan.trials[-1].outcome == "ok"
    assert len(tracer.traced) <= 20
    assert "trace_differs" in codes(plan.warnings)


def test_a_card_too_small_for_the_model_is_a_clear_no() -> None:
    with pytest.raises(DoesNotFitError) as seen:
        predict(gib=0.3)
    assert re.fullmatch(
        r"micro-batch 1 does not fit: it would take 4\d\d MiB with no limit, 307 MiB are available: take a "
        "smaller model, --precision bf16, activation checkpointing, or more memory",
        str(seen.value),
    )


def test_several_ranks_and_limits() -> None:
    plan = predict(world_size=4)
    assert plan.world_size == 4
    assert predict(max_trials=1).stopped == "trials"
    assert predict(max_micro_batch=8).largest_fit == 8
    with pytest.raises(UsageError, match="largest micro-batch to try is 1, the least"):
        predict(SyntheticTracer(inspection=replace(INSPECTION, least_size=2)), max_micro_batch=1)


# --- a measured plan that a forecast guides -------------------------------------------------------------------------


class RealCard(ScriptedDevice):
    """A card whose trials run by rule, and whose simulation is a little off."""

    def __init__(self, forecast: Forecast) -> None:
        super().__init__(lambda size: "ok" if self.needs(size) <= 8 * GIB else "oom", limit_bytes=8 * GIB)
        self._forecast = forecast

    def needs(self, size: int) -> int:
        return GIB + size * 77 * MIB

    def forecast(self, *, limit_seconds: float | None = None, choose: ChooseParts | None = None) -> Forecast:
        return self._forecast


def measure(forecast: Forecast, target: int = 256, **request: Any) -> tuple[Plan, list[TrialStarted]]:
    events: list[Event] = []
    plan = plan_on(RealCard(forecast), target, on_event=events.append, **request)
    return plan, [event for event in events if isinstance(event, TrialStarted)]


@pytest.mark.parametrize("error", [-0.03, -0.01, 0.0, 0.01, 0.03])
def test_a_measured_plan_needs_few_trials(error: float) -> None:
    plan, trials = measure(Forecast(peak_bytes=lambda size: round((1 + error) * (GIB + size * 77 * MIB))))
    assert plan.kind == "measured"
    assert (plan.largest_fit, plan.micro_batch) == (86, 86)
    assert len(trials) == 2
    assert plan.min_budget_bytes is None
    assert plan.uncertainty_bytes is None


def test_without_a_forecast_the_answer_is_the_same_and_a_note_says_why() -> None:
    note = Message("not_simulated", {"error": "no reason"})
    plan, trials = measure(Forecast(notes=(note,)), exact_max=True)
    assert plan.largest_fit == 93
    assert note in plan.notes
    assert trials[0].parts == (1, 1)


@pytest.mark.parametrize(("target", "request_"), [(4, {}), (256, {"max_micro_batch": 5}), (256, {"max_trials": 2})])
def test_where_little_is_to_be_won_nothing_is_simulated(target: int, request_: dict[str, Any]) -> None:
    def never(size: int) -> int:
        raise AssertionError

    _, trials = measure(Forecast(peak_bytes=never), target, **request_)
    assert trials[0].parts[0] == 1


class _Slow(SyntheticTracer):
    """Takes long over sizes from `slow_from` on: as long as it may, and is ended there."""

    slow_from = 3

    def _trace(self, parts: tuple[int, ...], limit_seconds: float | None) -> Trace:
        if parts[0] < self.slow_from:
            return super()._trace(parts, limit_seconds)
        assert limit_seconds is not None, "nothing is traced without a limit"
        time.sleep(limit_seconds)
        raise NotMeasuredError(f"it took longer than {limit_seconds} s, and was ended")


def test_a_time_limit_ends_a_trace_of_a_forecast_and_leaves_the_least_size() -> None:
    """A forecast traces sizes 2 and 5: it once took as long as it liked, and nothing was known then."""
    tracer = _Slow()
    plan = predict(tracer, time_limit=0.5, gib=20.0)
    assert (plan.micro_batch, plan.largest_fit, plan.stopped) == (1, 1, "time")
    assert {trial.micro_batch for trial in plan.trials if trial.ran} == {1}
    assert (plan.warnings[0].code, plan.warnings[0].facts["largest_fit"]) == ("stopped", 1)
    assert tracer.closed <= 1, "no process is started after the limit"
