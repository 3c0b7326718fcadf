"""The plan that prefers the fastest micro-batch to the largest."""

from __future__ import annotations

from typing import Any

import pytest
from asking import make_request
from planned import plan_on
from scripted_device import TimedDevice

from autoaccum.errors import DoesNotFitError, UsageError
from autoaccum.planning.plan_events import Doing, Event
from autoaccum.planning.plan_record import Plan


def run(device: TimedDevice, target: int = 256, **request: Any) -> Plan:
    return plan_on(device, target, prefer="fastest", **request)


def test_the_smallest_that_is_nearly_the_fastest_is_taken_and_proved() -> None:
    device = TimedDevice(lambda size: min(size, 20.0) + size / 200)
    found = run(device)
    assert (found.micro_batch, found.iter_size, found.largest_fit) == (32, 8, 86)
    assert found.throughput is not None
    assert [speed.micro_batch for speed in found.throughput.speeds] == [1, 2, 4, 8, 16, 32, 64, 86]
    assert (found.throughput.knee, found.throughput.fastest) == (32, 86)
    assert (found.trials[-1].parts, found.trials[-1].fresh) == ((32, 32), True)
    assert found.notes[-1].startswith("micro-batch 32 makes 20.2 samples/s, within 2 % of the fastest, 86 with 20.4")
    assert Plan.from_json(found.to_json()) == found


def test_times_do_not_enter_the_digest() -> None:
    first, second = run(TimedDevice(float)), run(TimedDevice(lambda size: size * 1.5))
    assert first.throughput != second.throughput
    assert first.digest() == second.digest()


def test_the_largest_needs_no_further_trial_where_it_is_the_fastest() -> None:
    device = TimedDevice(float)
    found = run(device)
    assert (found.micro_batch, found.trials[-1].micro_batch) == (86, device.asked[-1][0][0])
    assert len(found.trials) == len(plan_on(TimedDevice(float)).trials)


def test_no_size_is_timed_unless_asked_for_nor_above_what_fits() -> None:
    device = TimedDevice(float)
    run(device, max_micro_batch=40)
    assert max(device.timed) == 37
    assert plan_on(TimedDevice(float)).throughput is None


def test_parts_stay_equal_where_they_are_to_be() -> None:
    found = run(TimedDevice(lambda size: min(size, 10.0)), 250, equal=True)
    assert set(found.micro_batches) == {10}


def test_what_cannot_be_timed_leaves_the_largest_with_a_warning() -> None:
    def fail(size: int) -> float:
        raise DoesNotFitError("it ran out of memory")

    found = run(TimedDevice(fail))
    assert (found.micro_batch, found.throughput) == (86, None)
    assert found.warnings[-1].endswith("the plan has the largest micro-batch, not the fastest: it ran out of memory")
    late = run(TimedDevice(float, seconds=0.06), time_limit=0.2)
    assert late.throughput is None
    assert any("updates were not timed" in text and "time limit" in text for text in late.warnings)


def test_progress_is_told() -> None:
    events: list[Event] = []
    device = TimedDevice(float)
    run(device, 8, on_event=events.append)
    assert [event.subject for event in events if isinstance(event, Doing) and event.what == "timing"] == device.timed


def test_what_cannot_be_timed_at_all_is_refused_before_any_trial() -> None:
    with pytest.raises(UsageError, match="times one process, and there are 2 ranks"):
        run(TimedDevice(float), world_size=2)
    with pytest.raises(UsageError, match="prefer"):
        make_request(2, prefer="smallest")
