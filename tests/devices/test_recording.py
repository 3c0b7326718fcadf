from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoaccum.devices.process import ChildDied
from autoaccum.devices.recording import Reading, record_death, record_reply
from autoaccum.units import GIB, MIB

ABOUT = {"parts": (8, 8), "fresh": True, "limit_bytes": None}


def reply(failure: dict[str, Any] | None = None, **reading: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"seconds": 1.5, "reading": dataclasses.asdict(Reading(**reading))}
    return answer if failure is None else {**answer, "failure": failure, "phase": "backward"}


OOM = {"outcome": "oom", "message": "micro-batch 8, backward ran out of memory", "certain": True}


def test_a_card_tells_both_peaks_and_its_retries() -> None:
    told = reply(peak_reserved_bytes=3 * GIB, peak_allocated_bytes=2 * GIB, retries=0, refusals=0)
    trial = record_reply(told, 4 * GIB, ABOUT)
    assert (trial.outcome, trial.message, trial.phase) == ("ok", None, None)
    assert (trial.peak_reserved_bytes, trial.peak_allocated_bytes, trial.allocator_retries) == (3 * GIB, 2 * GIB, 0)
    assert (trial.seconds, trial.fresh, trial.parts) == (1.5, True, (8, 8))


@pytest.mark.parametrize(
    ("retries", "refusals", "message"),
    [
        (1, 0, "it ran, but the allocator released its cache and tried again once"),
        (
            3,
            1,
            "it ran, but the allocator released its cache and tried again 3 times, and was refused all the same where "
            "a smaller workspace did",
        ),
    ],
)
def test_a_trial_that_ran_by_retries_is_tight(retries: int, refusals: int, message: str) -> None:
    told = reply(peak_reserved_bytes=3 * GIB, peak_allocated_bytes=2 * GIB, retries=retries, refusals=refusals)
    trial = record_reply(told, 3 * GIB, ABOUT)
    assert (trial.outcome, trial.ran, trial.allocator_retries) == ("tight", True, retries)
    assert trial.message == message


def test_a_budget_that_others_have_eaten_into_is_told() -> None:
    told = reply(OOM, peak_reserved_bytes=GIB, retries=1, refusals=1, available_bytes=GIB)
    assert record_reply(told, 4 * GIB, ABOUT).message == (
        "micro-batch 8, backward ran out of memory; only 1.0 GiB of the budget of 4.0 GiB were there: other processes "
        "have taken the rest since"
    )


def test_the_hosts_count_is_coarse_and_its_limit_is_not() -> None:
    trial = record_reply(reply(peak_reserved_bytes=60 * MIB + 4096), 60 * MIB, ABOUT)
    assert (trial.outcome, trial.peak_reserved_bytes) == ("ok", 60 * MIB)


def test_shared_memory_beyond_the_budget_is_out_of_memory() -> None:
    trial = record_reply(reply(peak_reserved_bytes=80 * MIB, shared_bytes=48 * MIB), 60 * MIB, ABOUT)
    assert (trial.outcome, trial.phase) == ("oom", "update")


@pytest.mark.parametrize(
    ("death", "outcome", "timed_out"),
    [
        (ChildDied("limit", "was ended after 3 s"), "error", True),
        (ChildDied("exit", "left with exit status 3"), "error", False),
        (ChildDied("signal", "was killed by the kernel", out_of_memory=True), "oom", False),
    ],
)
def test_deaths(death: ChildDied, outcome: str, timed_out: bool) -> None:
    trial = record_death(death, {**ABOUT, "limit_bytes": GIB})
    assert (trial.outcome, trial.timed_out, trial.limit_bytes) == (outcome, timed_out, GIB)
