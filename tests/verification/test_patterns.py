from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.verification.causes.loop_causes import LoopMistake, SplitFactors, find_mistake

COUNTS = ((3, 1, 2), (4, 2))
EVEN = ((3, 3, 3, 3), (4, 4, 4))


def cut(counts: tuple[int, ...], factor: Callable[[int, int, int], float]) -> SplitFactors:
    """A loop's factor of a part, given its count, all counts and the number of parts."""
    total, parts = sum(counts), len(counts)
    return SplitFactors(
        tuple(factor(count, total, parts) for count in counts), tuple(count / total for count in counts)
    )


LOOPS: dict[str, tuple[Callable[[int, int, int], float], LoopMistake]] = {
    "adds means": (lambda count, total, parts: 1.0, "undivided"),
    "adds shares, times the parts": (lambda count, total, parts: parts * count / total, "undivided"),
    "divides means by the square": (lambda count, total, parts: 1 / parts**2, "divided twice"),
    "divides shares by the parts": (lambda count, total, parts: count / total / parts, "divided twice"),
    "averages means": (lambda count, total, parts: 1 / parts, "mean of means"),
    "divides means by 8": (lambda count, total, parts: 1 / 8, "constant"),
    "divides counts by 64": (lambda count, total, parts: count / 64, "constant"),
    "multiplies shares by 3": (lambda count, total, parts: 3 * count / total, "scaled"),
    "counts one more": (lambda count, total, parts: (count + 1) / total, "uneven"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_names_what_is_wrong(loop: str) -> None:
    factor, fault = LOOPS[loop]
    assert find_mistake(cut(COUNTS[0], factor), cut(COUNTS[1], factor)) == fault
    evenly = {"averages means": None, "counts one more": "scaled"}.get(loop, fault)
    assert find_mistake(cut(EVEN[0], factor), cut(EVEN[1], factor)) == evenly


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_finds_nothing_where_parts_count_for_their_shares(counts: list[int]) -> None:
    assert find_mistake(cut(tuple(counts), lambda count, total, parts: count / total)) is None


def test_finds_nothing_wrong_with_a_sum() -> None:
    assert find_mistake(SplitFactors((1.0, 1.0), (1.0, 1.0))) is None
    assert find_mistake(SplitFactors((0.5, 0.5), (1.0, 1.0)), SplitFactors((1 / 3,) * 3, (1.0,) * 3)) == "mean of means"


def test_distinguishes_zeroed_gradients_from_parts_left_out() -> None:
    assert find_mistake(SplitFactors((0.0, 0.0, 0.4), (0.3, 0.3, 0.4))) == "zeroed"
    assert find_mistake(SplitFactors((0.3, 0.3, 0.0), (0.3, 0.3, 0.4))) == "left out"


def test_a_part_of_no_weight_is_not_missed() -> None:
    assert find_mistake(SplitFactors((0.0, 1.0), (0.0, 1.0))) is None


def test_a_divisor_is_fixed_only_where_another_cut_says_so() -> None:
    one_part = SplitFactors((0.5,), (1.0,))
    assert find_mistake(one_part, SplitFactors((0.5, 0.5), (0.5, 0.5))) == "constant"
    assert find_mistake(one_part) == "scaled"
