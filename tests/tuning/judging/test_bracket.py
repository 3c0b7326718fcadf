"""The bracket: tried rates around the best that are clearly worse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from judged_rows import pruned, repeats, setting, trial

from autoaccum.tuning.judging.bracket import NOISE_DEVIATIONS, find_bracket, find_noise
from autoaccum.tuning.judging.standings import rank
from autoaccum.tuning.records import Bracket, Row

AWAY = st.floats(-4, 4).map(lambda power: round(power, 3))


def bracket_of(*rows: Row) -> Bracket:
    found = find_bracket(rows, rank(rows))
    assert found is not None
    return found


def noisy(best: Row) -> list[Row]:
    """Repetitions of a loss of 1 with a standard deviation of 0.1: noise is 0.28."""
    return repeats(best, 1.1, 0.9)


def test_without_repetitions_any_difference_counts() -> None:
    found = bracket_of(trial(0, 0.1, 3.0), trial(1, 0.2, 1.0), trial(2, 0.3, 1.001), trial(3, 0.05, 9.0))
    assert found == Bracket(low=0.1, best=0.2, high=0.3, noise=None)


def test_with_them_only_what_chance_does_not_explain() -> None:
    best = trial(1, 0.2, 1.0)
    rows = [trial(0, 0.1, 3.0), best, trial(2, 0.3, 1.2), trial(3, 0.4, 1.3), trial(4, 0.15, 1.25), *noisy(best)]
    found = bracket_of(*rows)
    assert (found.low, found.best, found.high) == (0.1, 0.2, 0.4)
    assert found.noise == pytest.approx(NOISE_DEVIATIONS * math.sqrt(2) * 0.1)


def test_the_noise_is_pooled_over_what_was_repeated() -> None:
    one, other = trial(0, 0.1, 1.0), trial(1, 0.2, 5.0)
    rows = [one, other, *repeats(one, 1.2, 1.4), *repeats(other, 5.0, None)]
    assert find_noise(rows) == pytest.approx(2 * math.sqrt(2 * (2 * 0.04 + 0.0) / 3))
    assert find_noise([one, other]) is None


def test_one_that_is_not_worse_opens_the_bracket_to_its_place() -> None:
    rows = (trial(0, 0.01, 9.0), trial(1, 0.02, 1.0), trial(2, 0.05, 9.0), trial(3, 0.1, 1.0), trial(4, 0.2, 9.0))
    found = bracket_of(*rows, *noisy(rows[1]))
    assert (found.low, found.best, found.high) == (0.01, 0.02, 0.2)


def test_where_nothing_is_worse_an_end_is_open() -> None:
    assert bracket_of(trial(0, 0.1, 1.0)) == Bracket(low=None, best=0.1, high=None, noise=None)
    rows = [trial(0, 0.1, 1.0), trial(1, 0.2, None, "failed"), trial(2, 0.05, None, "out_of_memory")]
    assert (bracket_of(*rows).low, bracket_of(*rows).high) == (None, None)
    assert find_bracket(rows[1:], rank(rows[1:])) is None


def test_what_diverged_is_worse() -> None:
    found = bracket_of(trial(0, 0.1, 1.0), trial(1, 0.5, None, "diverged", losses=((25, 0.1),)))
    assert (found.low, found.high) == (None, 0.5)


def test_other_batches_say_nothing() -> None:
    others = [trial(1, 0.5, 9.0, setting=setting(0.5, 128)), trial(2, 0.05, 9.0, setting=setting(0.05, 64, 8))]
    found = bracket_of(trial(0, 0.1, 1.0), *others)
    assert (found.low, found.high) == (None, None)


def test_a_faster_one_that_was_pruned_is_compared_where_it_ended() -> None:
    best = trial(0, 0.1, 1.0, losses=((25, 4.0), (50, 2.0)))
    behind, ahead = pruned(1, 0.2, (25, 5.0)), pruned(2, 0.4, (25, 3.0), (50, 2.5))
    assert bracket_of(best, behind).high == 0.2
    assert bracket_of(best, behind, ahead).high == 0.2
    near = pruned(2, 0.4, (25, 3.9))
    assert bracket_of(best, behind, near).high is None
    assert bracket_of(best, trial(1, 0.2, 2.0), pruned(2, 0.4)).high == 0.2


def test_a_slower_one_counts_only_where_it_cannot_catch_up() -> None:
    best = trial(0, 0.1, 1.0, losses=((25, 4.0), (50, 2.0)))
    assert bracket_of(best, pruned(1, 0.05, (25, 9.0))).low is None
    assert bracket_of(best, pruned(1, 0.05, (25, 9.0), (50, 6.0))).low == 0.05
    assert bracket_of(best, pruned(1, 0.025, (25, 9.0))).low == 0.025
    done = trial(0, 0.1, 1.0, losses=((25, 1.0), (50, 1.0)))
    assert bracket_of(done, pruned(1, 0.025, (25, 9.0))).low is None


def test_under_a_schedule_only_what_came_to_its_end_counts() -> None:
    """At half of a cosine, the rate that wins is behind a slower one (of a noisy quadratic, by its closed form)."""
    best = trial(0, 0.1, 1.0, losses=((25, 1.0), (50, 1.0)))
    ended = [pruned(1, 0.2, (25, 5.0)), pruned(2, 0.025, (25, 9.0), (50, 9.0))]
    rows = [best, *ended, trial(3, 0.01, 9.0), trial(4, 0.8, None, "diverged")]
    assert bracket_of(best, *ended).high == 0.2
    found = find_bracket(rows, rank(rows), scheduled=True)
    assert found == Bracket(low=0.01, best=0.1, high=0.8, noise=None)


@given(powers=st.lists(AWAY, min_size=1, max_size=30, unique=True), optimum=AWAY)
def test_without_noise_a_valley_s_floor_is_within(powers: list[float], optimum: float) -> None:
    rows = [trial(number, 10**power, (power - optimum) ** 2) for number, power in enumerate(powers)]
    found = bracket_of(*rows)
    assert found.low is None or found.low <= 10**optimum * (1 + 1e-9)
    assert found.high is None or found.high >= 10**optimum * (1 - 1e-9)
    assert (found.low or 0) < found.best < (found.high or math.inf)


@given(powers=st.lists(AWAY, min_size=1, max_size=12, unique=True), losses=st.data(), width=st.floats(0.01, 1))
def test_all_that_is_not_clearly_worse_lies_within(powers: list[float], losses: st.DataObject, width: float) -> None:
    drawn = losses.draw(st.lists(st.floats(1, 10), min_size=len(powers), max_size=len(powers)))
    rows = [trial(number, 10**power, loss) for number, (power, loss) in enumerate(zip(powers, drawn, strict=True))]
    best = rank(rows)[0]
    assume(best.mean is not None)
    rows += repeats(rows[best.trial], best.losses[0] + width, best.losses[0] - width)
    found = bracket_of(*rows)
    assert found.noise is not None
    for row in rows[: len(powers)]:
        assert row.loss is not None
        if row.loss - best.losses[0] <= found.noise:
            assert within(found)(row)


def within(bracket: Bracket) -> Callable[[Row], bool]:
    def told(row: Row) -> bool:
        assert row.setting is not None
        return (bracket.low or 0) < row.setting.learning_rate < (bracket.high or math.inf)

    return told
