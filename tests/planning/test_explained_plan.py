"""Plans that say where the memory goes: what they keep, when they are refused, and that they never fail by it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from json_schemas import faults
from planned import CARD, make_plan_setup, make_request, plan_on, plan_simulated, simulated_card
from scripted_device import ScriptedDevice
from synthetic_traces import SyntheticTracer, linear

import autoaccum
from autoaccum.devices.child.requests import Request
from autoaccum.devices.explanation import Change, MemoryReport
from autoaccum.devices.simulated.simulation_requests import LabelParts
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import Message
from autoaccum.planning.plan_events import Doing, Event, Explained, TrialFinished
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.planner import explain_memory
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.simulation.cards import context_memory
from autoaccum.simulation.trace_records import CATEGORIES
from autoaccum.units import MIB

pytestmark = pytest.mark.usefixtures("warm_children")

SUGGESTIONS: dict[str, Any] = {
    "dearer": linear(sample=8 * MIB),
    "half": linear(sample=3 * MIB),
    "broken": "it broke\nin line 3",
}
VARIES = Message("changes_unknown", {"error": "two traces of the same micro-batches took other memory"})
GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def explain(tracer: SyntheticTracer | None = None, **asked: Any) -> Plan:
    tracer = tracer or SyntheticTracer(suggestions={"half": SUGGESTIONS["half"]})
    return plan_simulated(tracer, 64, **{"explain": True, **asked})


def changes_of(plan: Plan) -> dict[str, Change]:
    assert plan.explanation is not None
    return {change.name: change for change in plan.explanation.changes}


# --- what a plan keeps ------------------------------------------------------------------------------------------------


def test_what_is_told_of_the_schedules_own_parts_is_kept_on_disk(tmp_path: Path) -> None:
    plan = explain()
    found = plan.explanation
    assert found is not None
    assert found.card == "rtx3090 (simulated)"
    assert set(found.parts) == {plan.micro_batch}
    assert found.peak_bytes == plan.peak_bytes == sum(found.categories.values())
    assert tuple(found.categories) == CATEGORIES
    assert found.categories["parameters"] == found.categories["gradients"] == 100 * MIB
    assert found.context_bytes == context_memory(CARD).bytes
    assert found.modules
    plan.save(tmp_path / "plan.json")
    assert faults("plan", json.loads(plan.to_json())) == []
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded, loaded.explanation) == (plan, found)
    with pytest.raises(TypeError):
        loaded.explanation.categories["unused"] = 0  # type: ignore[union-attr, index]


def test_it_decides_nothing() -> None:
    plain, explained = explain(explain=False), explain()
    assert explained.digest() == plain.digest() == explain().digest()
    assert replace(explained, explanation=None, trials=plain.trials) == plain


def test_it_is_told_after_the_proof_along_with_what_pictures_need() -> None:
    told: list[Event] = []
    plan = explain(on_event=told.append, picture=True)
    assert isinstance(told[-3], TrialFinished)
    assert told[-2] == Doing("explaining")
    assert isinstance(told[-1], Explained)
    report = told[-1].report
    assert report.explanation == plan.explanation
    assert report.timeline.reserved_bytes
    assert [point.size for point in report.curve] == sorted(point.size for point in report.curve)
    assert plan.micro_batch in [point.size for point in report.curve]


def test_a_picture_alone_simulates_no_changes_and_is_not_kept() -> None:
    told: list[Event] = []
    plan = explain(SyntheticTracer(suggestions=SUGGESTIONS), on_event=told.append, explain=False, picture=True)
    assert plan.explanation is None
    assert isinstance(told[-1], Explained)
    assert told[-1].report.explanation.changes == ()
    assert told[-1].report.curve
    assert plan == replace(explain(explain=False), trials=plan.trials)


# --- changes ----------------------------------------------------------------------------------------------------------


def test_changes_come_in_the_order_of_what_they_save_those_that_fail_last() -> None:
    plan = explain(SyntheticTracer(suggestions={**SUGGESTIONS, "x": linear()}))
    assert plan.explanation is not None
    changes = changes_of(plan)
    del changes["expandable_segments"]  # No trace: see below.
    assert list(changes) == ["half", "x", "dearer", "broken"]
    half, same, dearer, broken = changes.values()
    assert (half.saved_bytes or 0) > (same.saved_bytes or 0) == 0 > (dearer.saved_bytes or 0)
    assert same.min_budget_bytes == plan.min_budget_bytes
    for change in (half, same, dearer):
        assert change.peak_bytes == plan.explanation.peak_bytes - (change.saved_bytes or 0)
        assert 0 < (change.min_budget_bytes or 0) <= (change.peak_bytes or 0)
    assert broken == Change(name="broken", what="take broken", message="it broke")


def test_another_allocator_needs_no_trace() -> None:
    plan = explain()
    with simulated_card(SyntheticTracer(), 64, environment=GROWING) as device:
        device.trial((plan.micro_batch,) * 2, fresh=True)
        peak_bytes = device.explain((plan.micro_batch,) * 2).explanation.peak_bytes
    assert plan.explanation is not None
    told = changes_of(plan)["expandable_segments"]
    assert (told.peak_bytes, told.saved_bytes) == (peak_bytes, plan.explanation.peak_bytes - peak_bytes)
    assert "expandable_segments" not in changes_of(explain(environment=GROWING)), "it is so already"


def test_what_differs_from_trace_to_trace_is_no_change() -> None:
    """A batch as long as a counter says, or a list that grows: the next trial run takes other memory by itself."""

    class Growing(SyntheticTracer):
        def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
            if isinstance(request, LabelParts):
                return SyntheticTracer(linear(sample=7 * MIB)).call(request, limit_seconds)
            return super().call(request, limit_seconds)

    plan = explain(Growing(suggestions=SUGGESTIONS))
    assert plan.explanation is not None
    assert plan.explanation.peak_bytes != plan.peak_bytes
    assert plan.explanation.changes == ()
    assert plan.notes[-1] == VARIES


# --- a plan never fails by it -----------------------------------------------------------------------------------------


class Measured(ScriptedDevice):
    """A device that is explained by a simulation, or not."""

    explains = True

    def __init__(self, report: MemoryReport | BaseException) -> None:
        super().__init__(lambda size: "ok" if size <= 40 else "oom")
        self._report = report

    def explain(self, parts: tuple[int, ...], **asked: Any) -> MemoryReport:
        if isinstance(self._report, BaseException):
            raise self._report
        return self._report


def test_a_measured_plan_keeps_its_peak_beside_the_simulated_one() -> None:
    with simulated_card(SyntheticTracer(), 64) as device:
        report = replace(device.explain((20, 20)), notes=(VARIES,))
    plan = plan_on(Measured(report), 64, explain=True)
    assert plan.kind == "measured"
    assert plan.peak_bytes == plan.trials[-1].peak_reserved_bytes
    assert plan.explanation is not None
    assert plan.explanation.card == "rtx3090 (simulated)"
    assert plan.notes[-1] == VARIES


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UsageError("only PyTorch's own allocator is simulated", hint="unset it"), "only PyTorch's own allocator"),
        (WorkloadError("a value is read\nin line 3"), r"a value is read\)"),
        (NotMeasuredError("its process died"), "its process died"),
        (KeyboardInterrupt(), "it was interrupted"),
    ],
    ids=["usage", "workload", "measurement", "interrupt"],
)
def test_what_cannot_be_explained_is_said_and_the_plan_kept(error: BaseException, text: str) -> None:
    plan = plan_on(Measured(error), 64, explain=True)
    assert (plan.micro_batch, plan.explanation) == (32, None)
    assert re.match(rf"where the memory goes is not known \({text}", str(plan.notes[-1]))


def test_no_time_is_left_for_an_explanation() -> None:
    told: list[Event] = []
    with simulated_card(SyntheticTracer(), 64) as device:
        limits = SearchLimits(None, 600.0, started=0.0, clock=lambda: 601.0)
        request = make_request(64, explain=True)
        found = explain_memory(make_plan_setup(device), request, (20, 20), limits, told.append)
    assert found == (None, (Message("not_explained", {"error": "the time limit of 600 s was used up"}),))
    assert not any(isinstance(event, Explained) for event in told)


@pytest.mark.without_gpu
def test_on_the_cpu_it_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(UsageError) as refused:
        autoaccum.plan(tmp_path / "model.py", target_batch=8, explain=True)
    assert str(refused.value) == (
        "explain (--explain) shows where the memory of a card goes, and trials run on the CPU: predict for a card,"
        " which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)"
    )
