"""What a script did with its sizes, from the reports of its runs."""

from __future__ import annotations

import pytest

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.command.command_runs import Observations
from autoaccum.devices.command.settings import ProcessReport
from autoaccum.sources.command import CommandSource

SETTINGS = TrialSettings(
    rank_samples=400, source=CommandSource.of(["python", "train.py", "--bs={micro_batch}", "--accum={iter_size}"])
)


@pytest.mark.parametrize(
    ("backwards", "refused"),
    [
        ((4, 4, 4), False),
        ((8, 8, 8), False),  # Two networks.
        ((4, 4, 2), False),  # The end of an epoch makes a short update,
        ((4, 4, 6), False),  # or goes into the next.
        ((1, 4, 4), False),
        ((1, 1, 1), True),
        ((3, 3, 3), True),
    ],
)
def test_accumulation_is_ignored_where_no_update_has_the_number_of_backward_passes(
    backwards: tuple[int, ...], refused: bool
) -> None:
    report = ProcessReport(pid=1, updates=3, backwards=backwards)
    observations, parts = Observations(SETTINGS), (100,) * 4
    assert (observations.check(parts, report) is not None) == refused
    warned = [warning.code for warning in observations.warnings(parts, report)]
    assert warned == ([] if set(backwards) in ({4}, {8}) else ["command_updates_differ"])
