from __future__ import annotations

import math

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from autoaccum.tuning.studies.samplers import describe_sampler, make_sampler
from autoaccum.tuning.studies.spreading import spread

STARTS = st.floats(0, 1, exclude_max=True)


@given(start=STARTS, count=st.integers(1, 50))
def test_rates_leave_no_large_gap(start: float, count: int) -> None:
    """The golden ratio's multiples leave gaps of at most its square over the count (three-distance theorem)."""
    rates = FloatDistribution(1e-4, 1.0, log=True)
    shares = sorted(math.log10(spread(rates, number, 0, start)) / 4 + 1 for number in range(count))
    gaps = [high - low for low, high in zip(shares, [*shares[1:], shares[0] + 1], strict=True)]
    assert max(gaps) <= 2.62 / count + 1e-9 or count == 1


@given(start=STARTS, number=st.integers(0, 10_000), low=st.integers(1, 1000), more=st.integers(1, 1000))
def test_values_lie_in_their_range(start: float, number: int, low: int, more: int) -> None:
    batch = spread(IntDistribution(low, low + more, log=True), number, 1, start)
    assert isinstance(batch, int)
    assert low <= batch <= low + more
    assert low <= spread(FloatDistribution(low, low + more), number, 0, start) <= low + more
    assert spread(CategoricalDistribution((1, 2, 4)), number, 2, start) in (1, 2, 4)


def test_every_choice_and_every_batch_comes() -> None:
    choices = CategoricalDistribution((1, 2, 4, 8))
    assert {spread(choices, number, 2, 0.3) for number in range(8)} == {1, 2, 4, 8}
    batches = [spread(IntDistribution(64, 1024, log=True), number, 1, 0.3) for number in range(100)]
    assert 40 <= sum(batch < 256 for batch in batches) <= 60


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_any_seed_draws(kind: str) -> None:
    """Also one that NumPy does not take: it knows 32 bits."""
    study = optuna.create_study(sampler=make_sampler(kind, 10**23))
    assert 1 <= study.ask({"learning_rate": FloatDistribution(1.0, 2.0)}).params["learning_rate"] <= 2


def test_samplers_are_stated_with_their_seeds() -> None:
    assert describe_sampler("tpe", 3) == "TPE behind 8 evenly spread trials, seed 3"
    assert describe_sampler("random", 3) == "random, seed 3"
