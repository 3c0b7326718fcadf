"""Schedules of micro-batches, and windows of a loader."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.accumulation.schedule import (
    Schedule,
    even_parts,
    fewer_parts,
    make_schedule,
    split_evenly,
    windows,
)
from autoaccum.errors import UsageError
from autoaccum.units import format_parts

targets = st.integers(1, 3000)
fits = st.integers(1, 4000)
world_sizes = st.integers(1, 24)


@settings(deadline=None)
@given(targets, fits, world_sizes)
def test_any_schedule_is_valid(target: int, largest_fit: int, world_size: int) -> None:
    check_schedule(make_schedule(target, largest_fit, world_size=world_size), target, largest_fit, world_size)


def check_schedule(schedule: Schedule, target: int, largest_fit: int, world_size: int, step: int = 1) -> None:
    parts = [part for rank in schedule.ranks for part in rank]
    sums = [sum(rank) for rank in schedule.ranks]
    assert sum(parts) == schedule.target_batch == target
    assert schedule.world_size == world_size == len(sums)
    assert max(parts) <= largest_fit
    assert {len(rank) for rank in schedule.ranks} == {schedule.iter_size}
    assert max(sums) - min(sums) <= step
    assert all(max(rank) - min(rank) <= step for rank in schedule.ranks)
    assert sum(schedule.micro_batches) == max(sums)
    # One micro-batch fewer could not hold the most samples of a rank.
    assert (schedule.iter_size - 1) * (largest_fit - largest_fit % step) < max(sums)


@settings(deadline=None)
@given(st.integers(1, 600), fits, world_sizes)
def test_equal_parts_are_the_largest_divisor_that_fits(rank_samples: int, largest_fit: int, world_size: int) -> None:
    schedule = make_schedule(rank_samples * world_size, largest_fit, world_size=world_size, equal=True)
    (part,) = {part for rank in schedule.ranks for part in rank}
    assert schedule.target_batch == rank_samples * world_size
    assert part == max(d for d in range(1, rank_samples + 1) if rank_samples % d == 0 and d <= largest_fit)


@settings(deadline=None)
@given(targets, st.integers(2, 24))
def test_equal_parts_need_a_divisible_target(target: int, world_size: int) -> None:
    if target % world_size == 0:
        assert make_schedule(target, 7, world_size=world_size, equal=True).target_batch == target
        return
    with pytest.raises(UsageError, match="does not divide equally") as seen:
        make_schedule(target, 7, world_size=world_size, equal=True)
    below, above = target // world_size * world_size, -(-target // world_size) * world_size
    assert seen.value.hint is not None
    assert [int(n) for n in re.findall(r"\d+", seen.value.hint)] == [n for n in (below, above) if n]


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 500))
def test_even_parts(total: int, count: int) -> None:
    parts = even_parts(total, count)
    assert sum(parts) == total
    assert len(parts) == count
    assert list(parts) == sorted(parts, reverse=True)
    assert parts[0] - parts[-1] <= 1


@pytest.mark.parametrize("value", [0, -1, -256, True, 2.0, 2.5, "8", None, float("nan")])
@pytest.mark.parametrize(
    ("name", "words"),
    [("target_batch", "target batch"), ("largest_fit", "largest micro-batch"), ("world_size", "world size")],
)
def test_values_that_are_no_counts_are_refused(name: str, words: str, value: Any) -> None:
    arguments: dict[str, Any] = {"target_batch": 8, "largest_fit": 4, "world_size": 1, name: value}
    with pytest.raises(UsageError, match=re.escape(f"the {words} is {value!r}")):
        make_schedule(**arguments)


@pytest.mark.parametrize("ranks", [(), ((),), ((1, 1), (1,)), ((2, -1),), ((0, 0),)])
def test_a_schedule_checks_itself(ranks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UsageError, match="a schedule"):
        Schedule(ranks)


def test_equal_parts_that_take_twice_as_many_are_told() -> None:
    assert fewer_parts(make_schedule(256, 100, equal=True), 100) is None
    uneven = fewer_parts(make_schedule(254, 100, equal=True), 100)
    assert uneven is not None
    assert uneven.micro_batches == (85, 85, 84)


@settings(deadline=None)
@given(targets, fits)
def test_formatted_parts_add_up(samples: int, largest_fit: int) -> None:
    terms = format_parts(split_evenly(samples, largest_fit)).split(" + ")
    assert (
        sum(int(a) * int(b) for a, _, b in (t.partition(" x ") if " x " in t else (t, "", 1) for t in terms)) == samples
    )


@given(st.integers(1, 400), st.integers(1, 500), st.integers(1, 9), world_sizes, st.integers(0, 8))
def test_every_part_is_a_multiple(units: int, most: int, each: int, world: int, extra: int) -> None:
    largest_fit = most * each + extra % each
    schedule = make_schedule(units * each, largest_fit, world_size=world, multiple_of=each)
    check_schedule(schedule, units * each, largest_fit, world, step=each)
    assert all(part % each == 0 for parts in schedule.ranks for part in parts)
    equal = make_schedule(units * each * world, largest_fit, world_size=world, equal=True, multiple_of=each)
    assert len({part for parts in equal.ranks for part in parts}) == 1
    assert equal.micro_batch % each == 0
    samples = units * each + extra % each
    parts = split_evenly(samples, largest_fit, each)
    assert sum(parts) == samples
    assert max(parts) <= max(largest_fit, each)
    assert [part for part in parts if part % each] == ([samples % each] if samples % each else [])


def test_sizes_that_are_no_multiples_are_refused() -> None:
    with pytest.raises(UsageError, match="the target batch is 7, and micro-batches are to be multiples of 2") as error:
        make_schedule(7, 4, multiple_of=2)
    assert error.value.hint == "take 6 or 8"
    with pytest.raises(UsageError, match="micro-batches of at most 3 are to be multiples of 4"):
        make_schedule(8, 3, multiple_of=4)


def test_windows_group_whatever_a_loader_yields() -> None:
    assert list(windows(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows([], 3)) == []
    for size in (0, -1):
        with pytest.raises(UsageError, match=f"iter_size is {size}"):
            windows([1], size)
