"""The knee: the smallest micro-batch within 2 % of the fastest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import NotMeasuredError
from autoaccum.tuning.judging.knee import KNEE_SHARE, find_knee
from autoaccum.tuning.records import Speed

MEDIANS = st.dictionaries(st.integers(1, 4096), st.none() | st.floats(1e-3, 1e6), min_size=1)


def speeds_of(medians: dict[int, float | None]) -> list[Speed]:
    return [
        Speed(
            micro_batch=size,
            iter_size=1,
            state="out_of_memory" if median is None else "measured",
            samples_per_second=median,
        )
        for size, median in medians.items()
    ]


def test_the_example_of_the_docs() -> None:
    assert find_knee(speeds_of({8: 70.0, 16: 97.9, 32: 98.0, 64: 100.0, 128: 99.0, 256: None})) == (64, 32)


def test_of_two_that_are_equally_fast_the_smaller() -> None:
    assert find_knee(speeds_of({64: 100.0, 32: 100.0})) == (32, 32)


def test_what_was_not_measured_is_no_knee() -> None:
    slower = Speed(micro_batch=1, iter_size=64, state="slower")
    assert find_knee([slower, *speeds_of({8: 5.0})]) == (8, 8)
    with pytest.raises(NotMeasuredError, match="no micro-batch could be timed"):
        find_knee([slower])


@given(medians=MEDIANS)
def test_nothing_smaller_is_as_good_and_nothing_is_faster(medians: dict[int, float | None]) -> None:
    measured = {size: median for size, median in medians.items() if median is not None}
    if not measured:
        with pytest.raises(NotMeasuredError):
            find_knee(speeds_of(medians))
        return
    fastest, knee = find_knee(speeds_of(medians))
    assert measured[fastest] == max(measured.values())
    bound = measured[fastest] * (1 - KNEE_SHARE)
    assert knee <= fastest
    assert measured[knee] >= bound
    assert all(median < bound for size, median in measured.items() if size < knee)
