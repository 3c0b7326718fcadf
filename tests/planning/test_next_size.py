from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.planning.next_size import Guess, next_size

LIMIT = 1_000_000


@settings(deadline=None)
@given(
    peaks=st.dictionaries(st.integers(1, 500), st.integers(0, 2 * LIMIT), max_size=6),
    gap=st.none() | st.integers(2, 10**6),
    trials=st.integers(0, 20),
    widening=st.sampled_from([1.0, 4.0, 4.0**12]),
    largest=st.integers(1, 500),
)
def test_stays_within_what_is_open(
    peaks: dict[int, int], gap: int | None, trials: int, widening: float, largest: int
) -> None:
    peaks = {size: peak for size, peak in peaks.items() if size <= largest}
    first_fail = None if gap is None else largest + gap
    size = next_size(peaks, largest, first_fail, LIMIT, widening=widening, trials=trials).size
    assert largest < size
    assert first_fail is None or size < first_fail
    # A big overshoot may swap before it fails: what no line predicts is at most 64 times what ran.
    safe = largest * LIMIT / max(peaks.get(largest, LIMIT), 1)
    assert size <= max(64 * largest, safe) or first_fail is not None


@pytest.mark.parametrize("ceiling", [10, 100, 1000])
def test_an_intercept_of_zero_is_reached_at_once(ceiling: int) -> None:
    assert next_size({1: LIMIT // ceiling}, 1, None, LIMIT).size in range(int(0.95 * ceiling), ceiling + 1)


def test_a_line_that_three_peaks_agree_on_is_believed() -> None:
    peaks = {n: 300_000 + 1_000 * n for n in (1, 64, 400)}
    guess = next_size(peaks, 400, None, LIMIT)
    assert guess.ceiling == pytest.approx(700, rel=0.01)
    assert guess.size in range(695, 702)


def test_flat_peaks_are_not_extrapolated_far() -> None:
    assert next_size({1: 500_000, 4: 500_000}, 4, None, LIMIT).size <= 64


def test_without_peaks_it_grows_and_then_halves() -> None:
    assert next_size({}, 16, None, LIMIT) == Guess(64)
    assert next_size({}, 16, 64, LIMIT) == Guess(32)


def test_the_uncertainty_widens_while_the_expected_ceiling_is_wrong() -> None:
    guess = Guess(10, ceiling=12.0)
    assert guess.widen(4.0, fits=False) == 12.0
    assert guess.widen(2.0, fits=True) == 1.0
    assert Guess(10).widen(4.0, fits=False) == 4.0
