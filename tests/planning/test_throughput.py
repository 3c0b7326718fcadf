"""Timed micro-batches and the knee of their throughput."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.planning.throughput import KNEE_SHARE, Speed, Throughput, measure_throughput


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
    assert known(10, 100).describe_knee() == "micro-batch 2 makes the most, 100 samples/s"
    assert known(10, 99, 100, 90).describe_knee() == (
        "micro-batch 2 makes 99 samples/s, within 2 % of the fastest, 4 with 100 samples/s; the largest that fits, 8,"
        " makes 90 samples/s"
    )
    assert "repeat" not in known(10, 100, spread=0.01).describe_knee()
    assert known(10, 100, spread=0.1).describe_knee().endswith("10.0 %, so that a repeat may find another")


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
