"""What makes a project take more is caught, and told: for what, of which module, and what is different about it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from guarded_edits import Edits, edited
from guarded_measuring import CASE, as_locked, measure_here
from guarded_regressions import REGRESSIONS, Regression

from autoaccum.guarding.comparing import compare
from autoaccum.guarding.records import Growth, Judgement, Measured, Tolerance

Measure = Callable[[Edits], Measured]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Measures the sample project as edited; each but once."""
    known: dict[str, Measured] = {}

    def measured(edits: Edits) -> Measured:
        source = edited(edits)
        if source not in known:
            known[source] = measure_here(source, tmp_path_factory.mktemp("project"))
        return known[source]

    return measured


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: regression.name)
def test_each_is_caught_and_told(regression: Regression, measure: Measure) -> None:
    before, now = measure(regression.start).measurement, measure(regression.edits)
    for known in (before, as_locked(before)):
        judgement = compare(CASE, known, now, Tolerance())
        assert (judgement.outcome, judgement.exit_code) == ("regressed", 1)
        assert judgement.reasons
        assert any(is_of(regression, growth) for growth in largest(judgement, regression.place)), judgement.explanation
        assert sentence(regression).search(judgement.explanation), judgement.explanation
        assert sum(growth.bytes for growth in judgement.growths) == judgement.growth_bytes


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: regression.name)
def test_each_the_other_way_round_is_good_news_or_passes(regression: Regression, measure: Measure) -> None:
    before, now = measure(regression.edits).measurement, measure(regression.start)
    judgement = compare(CASE, before, now, Tolerance())
    assert judgement.outcome in ("improved", "within")
    assert judgement.exit_code == 0
    assert sum(growth.bytes for growth in judgement.growths) == judgement.growth_bytes


def test_settings_that_are_different_are_told(measure: Measure) -> None:
    now = measure((('precision = "bf16"', 'precision = "fp32"'),))
    assert "precision bf16 -> fp32" in compare(CASE, measure(()).measurement, now, Tolerance()).explanation


def test_a_tolerance_above_the_growth_lets_it_pass(measure: Measure) -> None:
    now = measure(((" nn.GELU()", " nn.GELU(approximate='tanh')"), ("4 * WIDTH", "6 * WIDTH")))
    assert compare(CASE, measure(()).measurement, now, Tolerance()).outcome == "regressed"
    assert compare(CASE, measure(()).measurement, now, Tolerance(0.5)).outcome == "within"


def largest(judgement: Judgement, count: int) -> list[Growth]:
    """The growths that are told first."""
    return [growth for growth in judgement.growths if growth.category != "unused"][:count]


def is_of(regression: Regression, growth: Growth) -> bool:
    """Whether a growth is the one that a regression makes."""
    told = growth.category, growth.module
    return growth.bytes > 0 and told == (regression.category, regression.module) and regression.change in growth.change


def sentence(regression: Regression) -> re.Pattern[str]:
    """What an explanation has to say of a regression: for what, of which module, how much, and what is different."""
    of = f" of {re.escape(regression.module)}" if regression.module else ""
    change = rf" \([^()]*{re.escape(regression.change)}[^()]*\)" if regression.change else ""
    return re.compile(rf"{regression.category.replace('_', ' ')}{of} \+[0-9.]+ [KMG]iB{change}")
