"""Plans that say where the memory goes: what they keep, when they are refused, and that they never fail by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from asking import make_request
from synthetic_traces import INSPECTION, SyntheticTracer, linear

import autoaccum
from autoaccum.devices.base import Capability, Device, Inspection, Trial
from autoaccum.devices.child.requests import Request
from autoaccum.devices.explanation import Change, MemoryReport
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import LabelParts
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.planning.plan_events import Doing, Event, Explained, TrialFinished
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import explain_memory, plan_on_device
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.simulation.cards import context_memory, find_card
from autoaccum.simulation.trace_records import CATEGORIES
from autoaccum.units import GIB, MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

CARD = find_card("rtx3090")
SUGGESTIONS: dict[str, Any] = {
    "dearer": linear(sample=8 * MIB),
    "half": linear(sample=3 * MIB),
    "broken": "it broke\nin line 3",
}


GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def simulated(
    tracer: SyntheticTracer, share: int = 64, environment: Mapping[str, str] = MappingProxyType({})
) -> SimulatedDevice:
    memory = MemorySize(bytes=2 * GIB)
    return SimulatedDevice(
        CARD, lambda: tracer, share=share, torch_version=(2, 13), memory=memory, environment=environment
    )


def changes_of(plan: Plan) -> dict[str, Change]:
    """Those that were traced: the allocator that could be another one is asked for below."""
    assert plan.explanation is not None
    return {change.name: change for change in plan.explanation.changes if change.name != "expandable_segments"}


def explain(
    tracer: SyntheticTracer | None = None, target: int = 64, listen: Callable[[Event], None] | None = None, **asked: Any
) -> Plan:
    request = make_request(target, **{"explain": True, **asked})
    with simulated(tracer or SyntheticTracer(suggestions={"half": SUGGESTIONS["half"]}), request.share) as device:
        return plan_on_device(PlanSetup(device, "model.py"), request, on_event=listen)


# --- what a plan keeps ------------------------------------------------------------------------------------------------


def test_what_is_told_of_the_schedules_own_parts() -> None:
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


def test_it_decides_nothing() -> None:
    plain, explained = explain(explain=False), explain()
    assert explained.digest() == plain.digest() == explain().digest()
    assert replace(explained, explanation=None, trials=plain.trials) == plain


def test_it_is_told_after_the_proof_along_with_what_pictures_need() -> None:
    told: list[Event] = []
    plan = explain(listen=told.append, picture=True)
    assert isinstance(told[-3], TrialFinished)
    assert told[-2] == Doing("explaining")
    assert isinstance(told[-1], Explained)
    account = told[-1].account
    assert account.explanation == plan.explanation
    assert account.timeline.reserved_bytes
    assert [point.size for point in account.curve] == sorted(point.size for point in account.curve)
    assert plan.micro_batch in [point.size for point in account.curve]


def test_a_picture_alone_simulates_no_changes_and_is_not_kept() -> None:
    told: list[Event] = []
    tracer = SyntheticTracer(suggestions=SUGGESTIONS)
    plan = explain(tracer, listen=told.append, explain=False, picture=True)
    assert plan.explanation is None
    assert isinstance(told[-1], Explained)
    assert told[-1].account.explanation.changes == ()
    assert told[-1].account.curve
    assert plan == replace(explain(explain=False), trials=plan.trials)


# --- changes ----------------------------------------------------------------------------------------------------------


def test_changes_come_in_the_order_of_what_they_save_those_that_fail_last() -> None:
    plan = explain(SyntheticTracer(suggestions={**SUGGESTIONS, "x": linear()}))
    assert plan.explanation is not None
    changes = changes_of(plan)
    assert list(changes) == ["half", "x", "dearer", "broken"]
    half, same, dearer, broken = changes.values()
    assert half.saved_bytes is not None
    assert half.saved_bytes > 0
    assert same.saved_bytes == 0
    assert same.least_bytes == plan.least_bytes
    assert dearer.saved_bytes is not None
    assert dearer.saved_bytes < 0
    for change in (half, same, dearer):
        assert change.peak_bytes == plan.explanation.peak_bytes - (change.saved_bytes or 0)
        assert change.least_bytes is not None
        assert change.peak_bytes is not None
        assert 0 < change.least_bytes <= change.peak_bytes
    assert broken == Change(name="broken", what="take broken", message="it broke")


def test_another_allocator_needs_no_trace() -> None:
    plan, grown = explain(), None
    with simulated(SyntheticTracer(), environment=GROWING) as device:
        grown = plan_on_device(PlanSetup(device, "model.py"), make_request(64, explain=True))
        peak_bytes = device.explain((plan.micro_batch,) * 2).explanation.peak_bytes
    assert plan.explanation is not None
    told = {change.name: change for change in plan.explanation.changes}["expandable_segments"]
    assert told.peak_bytes == peak_bytes
    assert told.saved_bytes == plan.explanation.peak_bytes - peak_bytes
    assert grown.explanation is not None
    assert "expandable_segments" not in [change.name for change in grown.explanation.changes], "it is so already"


def test_no_time_is_left_for_an_explanation() -> None:
    told: list[Event] = []
    with simulated(SyntheticTracer()) as device:
        limits = SearchLimits(None, 600.0, started=0.0, clock=lambda: 601.0)
        request = make_request(64, explain=True)
        found = explain_memory(PlanSetup(device, "model.py"), request, (20, 20), limits, told.append)
    assert found == (None, ("where the memory goes was not traced: the time limit of 600 s was over",))
    assert not any(isinstance(event, Explained) for event in told)


# --- a plan never fails by it -----------------------------------------------------------------------------------------


class Measured(Device):
    """A card that runs everything up to 40 samples, and is explained by a simulation, or not."""

    name, limit_bytes = "cuda:0", GIB
    capabilities = frozenset[Capability]({"explain"})

    def __init__(self, account: MemoryReport | AutoaccumError) -> None:
        self.account = account
        self.asked: list[tuple[tuple[int, ...], bool, bool]] = []

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "cuda"}

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        return INSPECTION

    def trial(self, parts: tuple[int, ...], *, fresh: bool = False, **_: Any) -> Trial:
        outcome: Any = "ok" if max(parts) <= 40 else "oom"
        return Trial(parts=parts, outcome=outcome, phase=None, peak_reserved_bytes=max(parts) * 20 * MIB, fresh=fresh)

    def explain(
        self,
        parts: tuple[int, ...],
        *,
        changes: bool = True,
        curve: bool = False,
        limit_seconds: float | None = None,
    ) -> MemoryReport:
        self.asked.append((parts, changes, curve))
        if isinstance(self.account, AutoaccumError):
            raise self.account
        return self.account

    def close(self) -> None:
        pass


def account() -> MemoryReport:
    with simulated(SyntheticTracer()) as device:
        return device.explain((20, 20))


def test_a_measured_plan_keeps_its_peak_beside_the_simulated_one() -> None:
    device = Measured(replace(account(), notes=("said so",)))
    plan = plan_on_device(PlanSetup(device, "model.py"), make_request(64, explain=True))
    assert plan.kind == "measured"
    assert device.asked == [(plan.trials[-1].parts, True, False)]
    assert plan.peak_bytes == plan.trials[-1].peak_reserved_bytes
    assert plan.explanation is not None
    assert plan.explanation.card == "rtx3090 (simulated)"
    assert plan.notes[-1] == "said so"


@pytest.mark.parametrize(
    "error",
    [
        UsageError("only PyTorch's own allocator is simulated", hint="unset it"),
        WorkloadError("a value is read\nin line 3"),
        NotMeasuredError("its process died"),
    ],
    ids=["usage", "workload", "measurement"],
)
def test_what_cannot_be_simulated_is_said_and_the_plan_kept(error: AutoaccumError) -> None:
    plan = plan_on_device(PlanSetup(Measured(error), "model.py"), make_request(64, explain=True))
    assert plan.micro_batch == 32
    assert plan.explanation is None
    assert plan.notes[-1] == f"where the memory goes is not known ({error.message.splitlines()[0]})"


# --- who cannot explain -----------------------------------------------------------------------------------------------


@pytest.mark.without_gpu
def test_on_the_cpu_it_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(UsageError) as refused:
        autoaccum.plan(tmp_path / "model.py", target_batch=8, explain=True)
    assert str(refused.value) == (
        "explain (--explain) shows where the memory of a card goes, and trials run on the CPU: predict for a card,"
        " which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)"
    )


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_it_is_kept_on_disk(tmp_path: Path) -> None:
    plan = explain(SyntheticTracer(suggestions=SUGGESTIONS))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.explanation == plan.explanation
    assert loaded.explanation is not None
    with pytest.raises(TypeError):
        loaded.explanation.categories["unused"] = 0  # type: ignore[index]
    record = json.loads(plan.to_json())["explanation"]
    assert sum(record["categories"].values()) == record["peak_bytes"]
    assert {change["name"] for change in record["changes"]} == {*SUGGESTIONS, "expandable_segments"}


# --- what differs by itself -------------------------------------------------------------------------------------------


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
    assert plan.notes[-1] == (
        "what would change the peak is not known: the same micro-batches, traced twice, took other memory"
    )


def test_an_interruption_ends_the_explanation_and_not_the_plan() -> None:
    class Interrupted(SyntheticTracer):
        def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
            if isinstance(request, LabelParts):
                raise KeyboardInterrupt
            return super().call(request, limit_seconds)

    plan = explain(Interrupted())
    assert plan.explanation is None
    assert plan.notes[-1] == "where the memory goes is not known (it was interrupted)"
    assert plan.digest() == explain(explain=False).digest(), "sentences decide nothing"
