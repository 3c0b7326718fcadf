"""What a script did with its sizes, from the reports of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.devices.base import Trial, TrialSettings
from autoaccum.devices.command.observations import Observations
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


@pytest.mark.parametrize(
    ("parts", "report", "most"),
    [
        ((80, 80), {"rows": 50}, 50),
        ((80, 80), {"rows": 80, "later": 40}, 60),  # The data ends there.
        ((80, 80), {"backwards": (1, 1, 1)}, 40),  # An epoch has one batch.
        ((100,) * 4, {"backwards": (3, 3, 3)}, None),  # An epoch has fewer samples than the target batch.
        ((80, 80), {"updates": 1, "backwards": (2,)}, 40),
        ((80, 80), {"updates": 0, "backwards": (0,)}, 40),
        ((100,) * 4, {"updates": 1, "backwards": (4,)}, None),
        ((80, 80), {}, 0),
    ],
)
def test_the_most_that_the_data_may_suffice_for(
    parts: tuple[int, ...], report: dict[str, Any], most: int | None
) -> None:
    def report_of(
        size: int, rows: int = 0, later: int = 0, updates: int = 3, backwards: tuple[int, ...] = (2, 2, 2)
    ) -> ProcessReport:
        batch, others = ((rows or size, 8),), ((later or rows or size, 8),)
        return ProcessReport(pid=1, updates=updates, backwards=backwards, first_batch=batch, batches=(others,))

    observations = Observations(SETTINGS)
    assert observations.judge(Trial(parts=(2, 2), outcome="ok"), report_of(2)).ran
    seen = report_of(parts[0], **report)
    ended = Trial(parts=parts, outcome="error" if seen.updates < 2 else "ok", fault="measurement")
    judged = observations.judge(ended, seen)
    assert judged.ran if most == 0 else (judged.outcome, judged.most_samples) == ("error", most)
