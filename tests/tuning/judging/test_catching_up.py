"""Who is behind and may yet win."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import setting

from autoaccum.tuning.judging.catching_up import may_catch_up, pace

PACES = st.floats(1e-6, 1e3)
PERCENTS = st.sampled_from([25, 50])


@given(own=PACES, best=PACES, percent=PERCENTS)
def test_behind_the_best_alone_only_one_that_is_slower_but_not_too_slow(own: float, best: float, percent: int) -> None:
    slow, fast = setting(own), setting(best)
    assert may_catch_up(slow, fast, [fast], percent) == (best * percent / 100 < own < best)


@given(own=PACES, ahead=st.lists(PACES, min_size=1), percent=PERCENTS)
def test_the_more_are_ahead_the_less_it_may(own: float, ahead: list[float], percent: int) -> None:
    best = setting(ahead[0])
    answers = [
        may_catch_up(setting(own), best, map(setting, ahead[: count + 1]), percent) for count in range(len(ahead))
    ]
    assert answers == sorted(answers, reverse=True)


def test_what_has_gone_too_fast_stays_behind() -> None:
    assert not may_catch_up(setting(0.3), setting(0.2), [setting(0.2)], 25)
    assert not may_catch_up(setting(0.2), setting(0.3), [setting(0.3), setting(0.1)], 25)


def test_larger_batches_make_fewer_steps() -> None:
    assert pace(setting(0.1, 128)) == pytest.approx(pace(setting(0.05, 64)))
    assert may_catch_up(setting(0.1, 128), setting(0.1, 64), [setting(0.1, 64)], 25)
    assert not may_catch_up(setting(0.1, 512), setting(0.1, 64), [setting(0.1, 64)], 25)
