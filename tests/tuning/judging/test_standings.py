"""Who wins: one run each, then the mean over seeds of those that were repeated."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_rows import SEED, pruned, repeats, setting, trial

from autoaccum.tuning.judging.standings import own_standing, rank
from autoaccum.tuning.records import Row

LOSSES = st.floats(0, 100)


def test_before_any_repetition_the_lowest_loss_of_a_complete_trial_wins() -> None:
    rows = [
        trial(0, 0.1, 0.5, own=True),
        trial(1, 0.2, 0.3),
        trial(2, 0.3, 0.4),
        pruned(3, 0.4, (25, 0.1)),
        trial(4, 9.0, None, "diverged"),
        trial(5, 0.6, None, "out_of_memory"),
        trial(6, 0.7, None, "failed"),
        trial(7, 0.8, None, "running"),
        Row(number=8, state="waiting", setting=None, seed=SEED),
    ]
    assert [standing.trial for standing in rank(rows)] == [1, 2, 0]
    best = rank(rows)[0]
    assert (best.losses, best.failed, best.mean, best.spread) == ((0.3,), 0, 0.3, None)


def test_a_lucky_run_does_not_win() -> None:
    lucky, steady, third = trial(0, 0.1, 0.1), trial(1, 0.2, 0.2), trial(2, 0.3, 0.25)
    rows = [lucky, steady, third, *repeats(lucky, 0.5, 0.6), *repeats(steady, 0.22, 0.21)]
    standings = rank(rows)
    assert [standing.trial for standing in standings] == [1, 0, 2]
    assert standings[0].mean == pytest.approx(0.21)
    assert standings[1].losses == (0.1, 0.5, 0.6)
    assert standings[1].spread == pytest.approx(stdev((0.1, 0.5, 0.6)))


def test_what_diverged_once_does_not_win_while_there_is_another() -> None:
    risky, safe = trial(0, 0.1, 0.1), trial(1, 0.2, 0.9)
    rows = [risky, *repeats(risky, 0.1, None)]
    assert [(one.trial, one.failed, one.mean) for one in rank(rows)] == [(0, 1, None)]
    assert [one.trial for one in rank([*rows, safe])] == [1, 0]
    assert [one.trial for one in rank([*rows, safe, *repeats(safe, None, None)])] == [0, 1]


def test_what_ran_short_of_memory_is_behind_what_did_not() -> None:
    rows = [trial(0, 0.1, 0.1, shortages=1), trial(1, 0.2, 0.9)]
    assert [one.trial for one in rank(rows)] == [1, 0]
    assert rank(rows)[1].mean == 0.1


def test_a_setting_drawn_twice_is_one_and_so_is_a_run_taken_up_again() -> None:
    again = [trial(0, 0.1, 0.3), trial(1, 0.1, 0.3), trial(2, 0.2, 0.2)]
    assert [(one.trial, one.losses) for one in rank(again)] == [(2, (0.2,)), (0, (0.3,))]
    lost = [trial(0, 0.1, None, "failed", reason="the worker was lost"), trial(1, 0.1, 0.3, repeats=0)]
    assert [(one.trial, one.failed) for one in rank(lost)] == [(1, 0)]


def test_losses_that_are_no_numbers_do_not_count() -> None:
    assert rank([trial(0, 0.1, math.inf), trial(1, 0.1, math.nan), trial(2, 0.1, None)]) == ()


def test_the_workload_s_own_setting() -> None:
    rows = [trial(0, 0.1, 0.3, own=True), trial(1, 0.2, 0.2)]
    own = own_standing(rows)
    assert own is not None
    assert (own.trial, own.losses) == (0, (0.3,))
    assert own_standing([trial(0, 0.1, None, "diverged", own=True), trial(1, 0.2, 0.2)]) is None
    assert own_standing([]) is None


@given(
    losses=st.lists(LOSSES, min_size=1, max_size=8),
    repeated=st.lists(st.lists(st.none() | LOSSES, min_size=1, max_size=3), max_size=3),
    random=st.randoms(use_true_random=False),
)
def test_the_order_of_rows_decides_nothing(
    losses: list[float], repeated: list[list[float | None]], random: Random
) -> None:
    trials = [trial(number, 0.1 + number, loss) for number, loss in enumerate(losses)]
    rows = [*trials, *(row for of, more in zip(trials, repeated, strict=False) for row in repeats(of, *more))]
    standings = rank(rows)
    shuffled = random.sample(rows, len(rows))
    assert [(one.trial, sorted(one.losses), one.failed) for one in rank(shuffled)] == [
        (one.trial, sorted(one.losses), one.failed) for one in standings
    ]
    assert {one.setting for one in standings} == {row.setting for row in trials}
    assert all(one.mean == (None if one.failed else fmean(one.losses)) for one in standings)
    winning = [one.mean is not None for one in standings]
    assert winning == sorted(winning, reverse=True)
    assert all(one.setting == setting(0.1 + one.trial) for one in standings)


def test_a_repetition_that_was_lost_says_nothing_of_its_setting() -> None:
    best, second = trial(0, 0.1, 0.1), trial(1, 0.2, 0.2)
    lost = Row(number=0, state="failed", setting=best.setting, seed=SEED + 1, confirms=0, lost=True)
    assert [standing.trial for standing in rank([best, second, lost])] == [0, 1]
    assert [one.trial for one in rank([best, second, lost, *repeats(best, 0.12, 0.13)])] == [0, 1]
