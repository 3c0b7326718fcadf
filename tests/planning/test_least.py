from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoaccum.devices.base import Outcome, Trial
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.trial_runner import find_least_budget
from autoaccum.units import GIB, MIB

RESOLUTION_BYTES = 2 * MIB


def needing(least_bytes: int, tried: list[int] | None = None) -> Callable[[int], Trial]:
    def trial(limit_bytes: int) -> Trial:
        if tried is not None:
            tried.append(limit_bytes)
        outcome: Outcome = "ok" if limit_bytes >= least_bytes else "oom"
        return Trial(parts=(4, 4), outcome=outcome, limit_bytes=limit_bytes)

    return trial


@given(
    limit=st.integers(4 * MIB, 80 * GIB),
    least_share=st.floats(0.0, 1.0),
    peak_share=st.none() | st.floats(0.0, 1.0),
)
@example(limit=100 * MIB, least_share=1.0, peak_share=1.0)
@example(limit=5 * MIB, least_share=0.0, peak_share=0.0)
def test_ends_on_a_budget_that_ran_close_above_one_that_did_not(
    limit: int, least_share: float, peak_share: float | None
) -> None:
    least, tried = max(1, int(limit * least_share)), list[int]()
    peak = None if peak_share is None else int(limit * peak_share)
    found, note = find_least_budget(needing(least, tried), limit_bytes=limit, peak_bytes=peak)
    assert note is None
    assert found in [*tried, limit]
    assert least <= found <= least + max(RESOLUTION_BYTES, int(0.005 * found))
    assert all(0 < budget < limit for budget in tried)
    assert len(tried) <= 20


@pytest.mark.parametrize("share", [0.7, 0.95, 0.99, 1.0, 1.01, 1.05])
def test_the_peak_saves_trials(share: float) -> None:
    tried: list[int] = []
    peak = 8 * GIB
    find_least_budget(needing(int(share * peak), tried), limit_bytes=16 * GIB, peak_bytes=peak)
    assert len(tried) <= (8 if share >= 0.95 else 11)


def test_a_limit_ends_it_with_what_ran() -> None:
    tried: list[int] = []

    def trial(limit_bytes: int) -> Trial:
        if len(tried) == 3:
            raise SearchStopped("time", "the time limit of 60 s")
        return needing(3 * GIB, tried)(limit_bytes)

    found, note = find_least_budget(trial, limit_bytes=8 * GIB, peak_bytes=5 * GIB)
    assert found == min(budget for budget in tried if budget >= 3 * GIB)
    assert note == "the time limit of 60 s ended the search for the least budget: it may run with less than that"


def test_another_failure_ends_it_too_and_costs_no_plan() -> None:
    def trial(limit_bytes: int) -> Trial:
        return Trial(parts=(4,), outcome="error", message="micro-batch 4, forward raised ValueError: unlucky")

    found, note = find_least_budget(trial, limit_bytes=GIB, peak_bytes=512 * MIB)
    assert found == GIB
    assert note == (
        "the search for the least budget ended at 512 MiB: micro-batch 4, forward raised ValueError: unlucky"
    )
