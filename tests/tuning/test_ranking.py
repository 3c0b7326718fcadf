"""The ranking of settings, its noise, and its warnings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from small_studies import FACTS

from autoaccum.accumulation.coupling import Coupling
from autoaccum.tuning.ranking import describe_coupling, find_default_result, find_noise, find_range_warning, rank
from autoaccum.tuning.tune_request import LearningRateRange
from autoaccum.tuning.tuning_result import Row, RowState, Setting


def row(number: int, rate: float, loss: float | None, state: RowState = "complete", **more: Any) -> Row:
    setting = Setting(learning_rate=rate, target_batch=64, micro_batch=16)
    known: dict[str, Any] = {"setting": setting, "seed": 0, "loss": loss}
    return Row(number=number, state=state, **known | more)


def again(number: int, of: Row, seed: int, loss: float | None, state: RowState = "complete", **more: Any) -> Row:
    return Row(number=number, state=state, setting=of.setting, seed=seed, loss=loss, confirms=of.number, **more)


LUCKY, STEADY, WORSE = row(0, 0.1, 0.2), row(1, 0.2, 0.3), row(2, 0.3, 0.9)


def test_single_runs_are_ranked_by_loss_without_failed_ones() -> None:
    rows = [WORSE, LUCKY, STEADY, row(3, 0.4, None, "pruned", losses=((25, 0.1),)), row(4, 9.0, None, "diverged")]
    assert [one.trial for one in rank(rows)] == [0, 1, 2]
    assert rank(rows)[0].spread is None


def test_repeated_settings_win_by_their_mean_over_a_lucky_run() -> None:
    repeats = [again(3, STEADY, 1, 0.31), again(4, STEADY, 2, 0.29), again(5, WORSE, 1, 0.9), again(6, WORSE, 1, 5.0)]
    ranked = rank([LUCKY, STEADY, WORSE, *repeats])
    assert [one.trial for one in ranked] == [1, 2, 0]
    assert ranked[0].losses == (0.3, 0.31, 0.29)
    assert ranked[0].mean == pytest.approx(0.3)
    assert ranked[1].losses == (0.9, 0.9)  # A seed counts once.


def test_a_setting_of_which_a_run_failed_or_ran_short_comes_last() -> None:
    failed, lost = again(3, LUCKY, 1, None, "diverged"), again(4, STEADY, 1, None, "failed", lost=True)
    ranked = rank([LUCKY, STEADY, WORSE, failed, lost])
    assert [one.trial for one in ranked] == [1, 2, 0]
    assert (ranked[2].failed, ranked[2].mean) == (1, None)
    short = row(5, 0.5, 0.01, oom_retries=1)
    assert [one.trial for one in rank([LUCKY, short])] == [0, 5]


def test_the_workload_s_default_setting_is_found() -> None:
    rows = [row(0, 0.1, 0.5, own=True), STEADY]
    found = find_default_result(rows)
    assert found is not None
    assert found.losses == (0.5,)
    assert find_default_result([row(0, 0.1, None, "diverged", own=True), STEADY]) is None


def test_noise_is_two_deviations_of_a_difference_pooled_over_settings() -> None:
    rows = [LUCKY, again(3, LUCKY, 1, 0.4), STEADY, again(4, STEADY, 1, 0.3), WORSE]
    assert find_noise(rank(rows)) == pytest.approx(2 * (2 * (0.02 + 0.0) / 2) ** 0.5)
    assert find_noise(rank([LUCKY])) is None


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.1, None), (0.015, "search below 0.01, too"), (0.9, "search above 1, too")]
)
def test_a_best_rate_near_an_end_is_reported(rate: float, expected: str | None) -> None:
    warning = find_range_warning(rate, LearningRateRange(0.01, 1.0))
    assert warning is None if expected is None else str(warning).endswith(expected)


class Planned:
    def __init__(self, coupling: Coupling | None) -> None:
        self.coupling = coupling


@pytest.mark.parametrize(
    ("coupling", "batchnorms", "mode", "expected"),
    [
        (Coupling(loss=False), (), "micro", None),
        (Coupling(loss=False), ("1", "4"), "micro", "BatchNorm in modules 1 and 4 normalises by the micro-batch"),
        (Coupling(loss=False), ("1",), "frozen", None),
        (Coupling(modules=("1",), loss=False), ("1",), "exact", None),
        (
            Coupling(modules=("1", "mix"), loss=False),
            ("1",),
            "micro",
            "BatchNorm in module 1 .* in module mix",
        ),
        (Coupling(loss=True), (), "micro", "the loss mixes the samples of a batch"),
    ],
)
def test_batch_coupling_is_named(
    coupling: Coupling, batchnorms: tuple[str, ...], mode: str, expected: str | None
) -> None:
    facts = type(FACTS)(**{**vars(FACTS), "batchnorms": batchnorms, "batchnorm": mode})
    plan: Any = Planned(coupling)
    found, doubt = describe_coupling(plan, facts)
    assert doubt is None
    assert (found is None) == (expected is None)
    assert re.search(expected or "None", str(found))


def test_a_coupled_loss_is_that_of_the_whole_batch() -> None:
    for found in (Coupling(loss=True), Coupling()):
        plan: Any = Planned(found)
        assert describe_coupling(plan, type(FACTS)(**{**vars(FACTS), "coupled": True})) == (None, None)


@pytest.mark.parametrize("coupling", [None, Coupling(), Coupling(reason="the model is too large", loss=False)])
def test_unknown_coupling_is_a_warning(coupling: Coupling | None) -> None:
    plan: Any = Planned(coupling)
    found, doubt = describe_coupling(plan, FACTS)
    assert found is None
    assert "could not be determined" in str(doubt)
