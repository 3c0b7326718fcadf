from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.backpropagation import has_weight, make_shares
from autoaccum.errors import WorkloadError


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_the_shares_of_a_mean_add_up_to_one(weights: list[int]) -> None:
    shares = make_shares([float(weight) for weight in weights], "mean")
    numbers = [share for share in shares if not isinstance(share, dict)]
    assert sum(numbers) == pytest.approx(1.0 if any(weights) else 0.0)
    assert [has_weight(share) for share in numbers] == [weight > 0 for weight in weights]


def test_each_term_has_shares_of_its_own() -> None:
    shares = make_shares([{"a": 1.0, "b": 0.0}, {"b": 0.0, "a": 3.0}, {"a": 0.0, "b": 0.0}], "mean")
    assert shares == ({"a": 0.25, "b": 0.0}, {"a": 0.75, "b": 0.0}, {"a": 0.0, "b": 0.0})
    assert [has_weight(part) for part in shares] == [True, True, False]


def test_a_sum_is_not_divided() -> None:
    assert make_shares([{"a": 7.0}, {"a": 0.0}], "sum") == ({"a": 1.0}, {"a": 0.0})


def test_weights_of_different_kinds_are_refused() -> None:
    with pytest.raises(WorkloadError, match="a number for some parts"):
        make_shares([1.0, {"a": 1.0}], "mean")
    with pytest.raises(WorkloadError, match="terms a, weight has b"):
        make_shares([{"a": 1.0}, {"b": 1.0}], "mean")
