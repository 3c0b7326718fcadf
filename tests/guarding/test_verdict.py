"""The outcome: what is worse than it may be, and what says nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import guard_reports
import pytest
from guard_reports import CASE

from autoaccum.devices.explanation import Holding
from autoaccum.guarding.guard_result import DEFAULT_TOLERANCE, Measurement, Verdict
from autoaccum.guarding.verdict import compare
from autoaccum.units import GIB, MIB, MemorySize

UPDATE = "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update"
STATE = Holding(category="optimizer_state", module="head", kind="Linear", dtype="float32", bytes=2 * GIB)
LEAST = 14 * GIB + 200 * MIB


def took(
    held: float = 14 * GIB, *, peak: float = 15 * GIB, least: float = LEAST, dtype: str = "bfloat16", **more: Any
) -> Measurement:
    """A measurement with so many bytes held, all but `STATE` as activations of one module."""
    activations = Holding(
        category="activations",
        module="blocks.0.mlp",
        kind="MLP",
        dtype=dtype,
        op="aten.mm",
        bytes=int(held) - STATE.bytes,
    )
    known: dict[str, Any] = {"peak_bytes": int(peak), "min_budget_bytes": int(least), "phase": "backward", **more}
    return dataclasses.replace(guard_reports.BEFORE, holdings=(STATE, activations), **known)


BEFORE = took()


def judged(now: Measurement, before: Measurement = BEFORE, tolerance: MemorySize = DEFAULT_TOLERANCE) -> Verdict:
    return compare(CASE, before, now, tolerance, command=UPDATE)


def test_the_same_to_the_byte_has_nothing_to_say() -> None:
    verdict = judged(BEFORE)
    assert (verdict.outcome, verdict.exit_code, verdict.reasons) == ("passed", 0, ())
    assert (verdict.explanation, verdict.hint, verdict.command, verdict.growths) == ("", "", "", ())


def test_a_growth_is_reported_with_what_fits_now() -> None:
    grown = 1274 * MIB
    verdict = judged(took(14 * GIB + grown, peak=15 * GIB + grown + 20 * MIB, dtype="float32", largest=24))
    assert (verdict.outcome, verdict.exit_code) == ("regressed", 1)
    assert verdict.explanation == (
        "+1.26 GiB (+8.4 %): activations of blocks.0.mlp +1.24 GiB (bf16 -> fp32); rtx3090 now holds 24 instead of 32"
    )
    assert verdict.reasons == (
        "the largest micro-batch that fits fell from 32 to 24",
        "the peak grew by 1.26 GiB (8.4 %), 1% is allowed",
    )
    assert (verdict.hint, verdict.command) == ("if it is meant, lock it in", UPDATE)


@pytest.mark.parametrize(
    ("now", "explanation"),
    [
        (took(14.1 * GIB, peak=15.1 * GIB), "+102 MiB (+0.7 %): activations of blocks.0.mlp +102 MiB"),
        (
            took(12 * GIB, peak=13 * GIB, largest=40),
            "-2.00 GiB (-13.3 %): activations of blocks.0.mlp -2.00 GiB; rtx3090 now holds 40 instead of 32",
        ),
        (took(least=LEAST - MIB), "-1.0 MiB (-0.007 %) of the smallest budget"),
    ],
    ids=["within the tolerance", "less", "the smallest budget alone"],
)
def test_what_passes_is_explained_too(now: Measurement, explanation: str) -> None:
    verdict = judged(now)
    assert (verdict.outcome, verdict.exit_code, verdict.explanation) == ("passed", 0, explanation)
    assert (verdict.reasons, verdict.command) == ((), "")


def test_a_schedule_that_fits_no_more_is_the_heaviest_reason() -> None:
    verdict = judged(took(23 * GIB, peak=24 * GIB, least=24 * GIB, fits=False, largest=0))
    assert (
        verdict.reasons[0]
        == "micro-batch 32 does not fit any more: it needs at least 24.00 GiB, 23.00 GiB are available"
    )
    assert len(verdict.reasons) == 3
    assert verdict.explanation.endswith("; rtx3090 now holds none instead of 32")


def test_a_largest_one_that_fell_without_a_growth_has_a_cause() -> None:
    """Two local variables more: a block is freed later, and the next does not fit into its place."""
    verdict = judged(took(least=LEAST + 294 * MIB, largest=30))
    assert verdict.reasons == ("the largest micro-batch that fits fell from 32 to 30",)
    assert verdict.explanation == ("+294 MiB (+2.0 %) of the smallest budget; rtx3090 now holds 30 instead of 32")


@pytest.mark.parametrize(
    ("tolerance", "least"),
    [(DEFAULT_TOLERANCE, 2622), (MemorySize(fraction=0.5), 1324), (MemorySize(150 * MIB), 2623), (MemorySize(0), 2648)],
    ids=str,
)
def test_a_large_one_may_fall_by_the_tolerances_share_of_it(tolerance: MemorySize, least: int) -> None:
    before = took(largest=2648)
    assert judged(took(largest=least), before, tolerance).exit_code == 0
    assert judged(took(largest=least - 1), before, tolerance).exit_code == 1


SMALL = {"held": 390 * MIB, "peak": 400 * MIB, "least": 395 * MIB}
TIGHT = {"limit_bytes": 14 * GIB + 300 * MIB}


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ({}, {"held": 14 * GIB + 200 * MIB}, "what is held at the peak grew by 200 MiB (1.4 %)"),
        ({}, {"held": 15 * GIB, "peak": 14 * GIB, "least": 14 * GIB}, None),
        (SMALL, SMALL | {"peak": 419 * MIB}, None),
        (SMALL, SMALL | {"peak": 420 * MIB}, "the peak grew by 20.0 MiB (5.0 %)"),
        (SMALL, SMALL | {"peak": 410 * MIB, "held": 396 * MIB}, "the peak grew by 10.0 MiB (2.5 %)"),
        (
            SMALL,
            SMALL | {"peak": 416 * MIB, "least": 413 * MIB},
            "the peak grew by 16.0 MiB (4.0 %)",
        ),
        (TIGHT, TIGHT | {"peak": 16 * GIB}, None),
        (TIGHT, TIGHT | {"peak": 16 * GIB, "least": 15 * GIB}, "the smallest budget grew by 824 MiB (5.7 %)"),
    ],
    ids=[
        "held, at the same peak",
        "held, where less is needed",
        "a peak by less than a segment",
        "a peak by a segment",
        "a peak by less, and what is held",
        "a peak by less, and the smallest budget",
        "a peak that no card holds",
        "the smallest budget of such a peak",
    ],
)
def test_the_peak_what_is_held_and_the_least_budget_decide_together(
    before: dict[str, Any], now: dict[str, Any], reason: str | None
) -> None:
    verdict = judged(took(**now), took(**before))
    assert verdict.reasons == (() if reason is None else (f"{reason}, 1% is allowed",))
