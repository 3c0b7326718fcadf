"""Timed micro-batches, the knee of their throughput, and the plan that prefers it to the largest micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
from factories import codes
from hypothesis import given
from hypothesis import strategies as st
from planned import make_request, plan_on
from scripted_device import TimedDevice

from autoaccum.errors import DoesNotFitError, UsageError
from autoaccum.planning.plan_events import Doing, Event
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import KNEE_SHARE, Speed, Throughput, measure_throughput


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
    assert str(found.notes[-1]).startswith(
        "micro-batch 32 makes 20.2 samples/s, within 2 % of the fastest, 86 with 20.4"
    )
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
    assert found.warnings[-1].code == "not_timed"
    late = run(TimedDevice(float, seconds=0.06), time_limit=0.2)
    assert late.throughput is None
    assert "not_timed" in codes(late.warnings)


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


def known(*rates: float | None, spread: float = 0.0) -> Throughput:
    """At micro-batches of 1, 2, 4 and so on; None was not timed."""
    speeds = tuple(
        Speed(
            micro_batch=2**power,
            iter_size=1,
            samples_per_second=rate,
            low=None if rate is None else rate * (1 - spread / 2),
            high=None if rate is None else rate * (1 + spread / 2),
        )
        for power, rate in enumerate(rates)
    )
    return Throughput(target_batch=8, device="cpu", speeds=speeds)


@pytest.mark.parametrize(
    ("rates", "found"),
    [((10, 50, 99, 100), (8, 4)), ((10, 50, 97, 100), (8, 8)), ((None, 100, 100), (2, 2)), ((100, 99, 50), (1, 1))],
)
def test_the_knee_is_the_smallest_within_two_percent(rates: tuple[float | None, ...], found: tuple[int, int]) -> None:
    assert (known(*rates).fastest, known(*rates).knee) == found


@given(st.lists(st.none() | st.floats(0.1, 1000), min_size=1, max_size=10).filter(any))
def test_the_knee_is_never_far_from_the_fastest_nor_larger(rates: list[float | None]) -> None:
    timed = {2**power: rate for power, rate in enumerate(rates) if rate is not None}
    fastest, knee = known(*rates).fastest, known(*rates).knee
    assert timed[fastest] == max(timed.values())
    assert timed[knee] >= (1 - KNEE_SHARE) * timed[fastest]
    assert knee <= fastest
    assert all(rate < (1 - KNEE_SHARE) * timed[fastest] for size, rate in timed.items() if size < knee)


def test_the_choice_and_its_noise_are_told() -> None:
    assert str(known(10, 100).note) == "micro-batch 2 is the fastest, with 100 samples/s"
    assert str(known(10, 99, 100, 90).note) == (
        "micro-batch 2 makes 99 samples/s, within 2 % of the fastest, 4 with 100 samples/s; the largest that fits, 8,"
        " makes 90 samples/s"
    )
    assert "repeat" not in str(known(10, 100, spread=0.01).note)
    assert str(known(10, 100, spread=0.1).note).endswith("10.0 %, so another run may choose differently")


def test_sizes_take_turns_until_enough_is_known() -> None:
    calls: list[int] = []

    def time(size: int) -> float:
        calls.append(size)
        return 0.19 / size

    measured = measure_throughput(time, 8, [2, 4], "cpu")
    assert calls[:8] == [4, 4, 4, 2, 2, 4, 2, 4]
    assert [speed.updates for speed in measured.speeds] == [6, 11]


def test_smaller_sizes_far_behind_are_left_out() -> None:
    measured = measure_throughput(lambda size: 1.0 / size, 16, [1, 2, 4, 8, 16], "cpu")
    assert [speed.micro_batch for speed in measured.speeds if speed.updates] == [2, 4, 8, 16]
