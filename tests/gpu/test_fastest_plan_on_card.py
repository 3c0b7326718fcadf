"""The fastest micro-batch, and the fastest savers with it, are timed on a card as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_blocks import blocks_source

from autoaccum.api import plan
from autoaccum.planning.plan_record import Plan

WORKLOAD = blocks_source(4, hidden=512, length=64)

pytestmark = pytest.mark.gpu  # On the CPU as tests/cli/test_plan_fastest.py has it.


def check(made: Plan) -> None:
    assert made.throughput is not None
    assert made.micro_batch == made.throughput.knee <= made.largest_fit
    assert made.throughput.knee <= made.throughput.fastest
    proof = made.trials[-1]
    assert (proof.parts, proof.fresh, proof.outcome) == (made.schedule.trial_parts, True, "ok")


def test_the_fastest_that_fits_is_planned(write_workload: Callable[[str], str]) -> None:
    reference = write_workload(WORKLOAD)
    check(plan(reference, target_batch=64, device="cuda:0", memory="256MiB", prefer="fastest"))


def test_savers_are_timed_on_the_card(write_workload: Callable[[str], str]) -> None:
    reference = write_workload(WORKLOAD)
    made = plan(reference, target_batch=64, device="cuda:0", memory="64MiB", prefer="fastest", savers="auto")
    check(made)
    assert "sets of savers that were timed" in made.notes[0]
