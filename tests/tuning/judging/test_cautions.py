"""What is said beside the best setting."""

from __future__ import annotations

import pytest

from autoaccum.tuning.judging.cautions import cautions
from autoaccum.tuning.records import Standing
from autoaccum.tuning.settings import RateSpan, Setting

RATES = RateSpan(1e-4, 1.0)


def standing(trial: int, *losses: float, rate: float = 0.01, failed: int = 0) -> Standing:
    return Standing(
        trial=trial,
        setting=Setting(learning_rate=rate, target_batch=8, micro_batch=8),
        losses=losses,
        failed=failed,
        mean=None if failed else sum(losses) / len(losses),
        spread=None,
    )


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (1.5e-4, ["the best learning rate lies near the end of the range: search below 0.0001, too"]),
        (2.1e-4, []),
        (0.01, []),
        (0.4, []),
        (0.6, ["the best learning rate lies near the end of the range: search above 1, too"]),
    ],
)
def test_near_an_end_the_range_was_too_short(rate: float, said: list[str]) -> None:
    assert cautions([standing(0, 0.5, 0.6, 0.5, rate=rate)], RATES) == said


def test_a_range_that_is_short_on_purpose_is_no_reason() -> None:
    assert cautions([standing(0, 0.5, rate=0.011)], RateSpan(0.01, 0.015)) == []


def test_a_best_that_fails_at_times_is_told_as_such() -> None:
    (said,) = cautions([standing(0, 0.5, 0.5, failed=1)], RATES)
    assert said == "of 3 runs with the best setting 1 did not train to the end, and no setting did better"


def test_a_best_that_was_run_once_beside_repeated_ones_is_told_as_such() -> None:
    (said,) = cautions([standing(4, 0.5), standing(1, 0.4, failed=2)], RATES)
    assert said == "the best setting was run once: those that were repeated did not always train"
    assert cautions([standing(4, 0.5), standing(1, 0.6)], RATES) == []


def test_a_lower_loss_that_was_not_repeated_is_told() -> None:
    repeated = standing(1, 0.5, 0.6, 0.4)
    (said,) = cautions([repeated, standing(7, 0.3), standing(9, 0.2)], RATES)
    assert said == "trial 7 has a lower loss than the best, and was not repeated: --confirm repeats it"
    assert cautions([repeated, standing(7, 0.5), standing(9, 0.2, failed=1)], RATES) == []


def test_without_a_best_nothing_is_said() -> None:
    assert cautions([], RATES) == []
