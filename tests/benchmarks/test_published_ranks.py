"""A plan for ranks that are not here agrees with torchtitan's published peak; `published_ranks.py` compares more."""

from __future__ import annotations

import pytest
from command_line import ROOT, Command
from published_ranks import PUBLISHED, read_gib, words_of


@pytest.mark.slow
def test_a_published_peak_is_predicted_within_3_percent(command: Command) -> None:
    """That of 8 ranks; what more hold less of follows from arithmetic, as test_rank_truth.py shows."""
    run = PUBLISHED[0]
    assert read_gib(run, command(ROOT, *words_of(run)).stdout) == pytest.approx(float(run.published_gib), rel=0.03)
