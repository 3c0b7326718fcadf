"""What the two rules say of other effective batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import setting

from autoaccum.tuning.judging.scaling import LINEAR, RULES, SQUARE_ROOT, advise, favoured_rule

RATES, TARGETS = st.floats(1e-8, 1e3), st.integers(1, 10**6)


@given(rate=RATES, target=TARGETS)
def test_both_rules_go_through_what_was_found(rate: float, target: int) -> None:
    for advice in advise(setting(rate, target)):
        times = advice.target_batch / target
        assert advice.linear == pytest.approx(rate * times)
        assert advice.square_root**2 == pytest.approx(rate**2 * times)
        assert (advice.linear < advice.square_root < rate) == (times < 1)


@given(rate=RATES, target=TARGETS)
def test_other_batches_ascend_around_the_own_one(rate: float, target: int) -> None:
    others = [advice.target_batch for advice in advise(setting(rate, target))]
    assert others == sorted(set(others))
    assert others[-2:] == [2 * target, 4 * target]
    assert others[:-2] == sorted({target // 4, target // 2} - {0})


@given(rate=RATES, target=TARGETS, between=TARGETS, last=TARGETS)
def test_a_rule_taken_twice_is_the_rule(rate: float, target: int, between: int, last: int) -> None:
    for rule in RULES:
        there = setting(rule.rate(setting(rate, target), between), between)
        assert rule.rate(there, last) == pytest.approx(rule.rate(setting(rate, target), last))


def test_the_rule_that_is_about_an_optimizer() -> None:
    assert favoured_rule("SGD") is LINEAR
    assert favoured_rule("RMSprop") is favoured_rule("Adam") is favoured_rule("AdamW") is SQUARE_ROOT
    assert favoured_rule("Adafactor") is None
    assert all("arXiv" in rule.source for rule in RULES)
