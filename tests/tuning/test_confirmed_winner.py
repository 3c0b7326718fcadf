"""The best few are repeated until the one that leads is one that was: a lucky run does not win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_studies import PureRunner, small_space, small_study, valley

from autoaccum.tuning.events import Confirming
from autoaccum.tuning.judging.standings import rank
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.runner import GoOn
from autoaccum.tuning.settings import BatchSpan, Setting
from autoaccum.tuning.tuning import run_trials


class LuckyRunner(PureRunner):
    """Diverges with other seeds than the search's, for the settings with the lowest losses.

    Args:
        lucky: How many of them.
    """

    def __init__(self, lucky: int) -> None:
        super().__init__()
        self._lucky = lucky

    def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
        """One training."""
        best = sorted({one for one, own in self.runs if own == 0}, key=lambda one: valley(one, 0))
        if seed != 0 and setting in best[: self._lucky]:
            self.runs.append((setting, seed))
            return Outcome(state="diverged", samples=10, updates=1, seconds=0.25, reason="the loss is nan")
        return super().run(setting, seed, go_on)


def run(where: Path, runner: PureRunner, confirm: int) -> tuple[Any, list[Confirming]]:
    request = TuneRequest(reference="valley.py", target_batch=BatchSpan(256, 256), trials=12, confirm=confirm)
    study, heard = small_study(where / "tune.journal", pruner="none"), list[Any]()
    assert run_trials(request, study, small_space(), runner, heard.append) is None
    return study, [event for event in heard if isinstance(event, Confirming)]


@pytest.mark.parametrize(("lucky", "confirm", "rounds"), [(0, 3, 1), (2, 3, 1), (3, 3, 2), (4, 3, 3), (2, 1, 3)])
def test_settings_are_repeated_until_a_repeated_one_leads(
    tmp_path: Path, lucky: int, confirm: int, rounds: int
) -> None:
    study, told = run(tmp_path, LuckyRunner(lucky), confirm)
    standings = rank(study.rows())
    assert len(told) == rounds
    assert standings[0].failed == 0
    assert len(standings[0].losses) == 3
    assert sum(1 for one in standings if one.failed) == lucky


def test_what_fails_with_every_other_seed_is_told_as_such(tmp_path: Path) -> None:
    study, told = run(tmp_path, LuckyRunner(12), 2)
    assert [len(event.trials) for event in told] == [2, 1, 1, 1, 1]
    standings = rank(study.rows())
    assert standings, "they are ranked all the same"
    assert sum(1 for one in standings if one.failed) == 6


def test_nothing_is_repeated_where_nobody_asked_for_it(tmp_path: Path) -> None:
    study, told = run(tmp_path, LuckyRunner(3), 0)
    assert not told
    assert all(row.confirms is None for row in study.rows())
