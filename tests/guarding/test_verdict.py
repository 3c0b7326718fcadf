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
from autoaccum.messages import Message, message
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


def growth_of(bytes: int, change: str = "") -> Message:
    return message("module_changed", category="activations", module="blocks.0.mlp", bytes=bytes, change=change)


def changed(bytes: int, quantity: str = "peak", before_bytes: int = 15 * GIB) -> Message:
    return message("memory_changed", quantity=quantity, bytes=bytes, before_bytes=before_bytes)


def now_holds(largest: int) -> Message:
    return message("largest_changed", gpu="rtx3090", before=32, now=largest)


def test_the_same_to_the_byte_has_nothing_to_say() -> None:
    assert judged(BEFORE) == Verdict(case=CASE, outcome="passed", before=BEFORE, now=BEFORE)


def test_a_growth_is_reported_with_what_fits_now() -> None:
    grown, unused = 1274 * MIB, 20 * MIB
    verdict = judged(took(14 * GIB + grown, peak=15 * GIB + grown + unused, dtype="float32", largest=24))
    assert (verdict.outcome, verdict.exit_code) == ("regressed", 1)
    assert verdict.explanation == (changed(grown + unused), growth_of(grown, "bf16 -> fp32"), now_holds(24))
    grew = {"quantity": "peak", "bytes": grown + unused, "before_bytes": 15 * GIB, "tolerance": "1%"}
    assert verdict.reasons == (message("largest_fell", before=32, now=24), message("memory_grew", **grew))
    assert (verdict.hint, verdict.command) == (message("lock_if_meant"), UPDATE)


@pytest.mark.parametrize(
    ("now", "explanation"),
    [
        (took(14 * GIB + 9 * MIB, peak=15 * GIB + 9 * MIB), (changed(9 * MIB), growth_of(9 * MIB))),
        (
            took(12 * GIB, peak=13 * GIB, largest=40),
            (changed(-2 * GIB), growth_of(-2 * GIB), now_holds(40)),
        ),
        (took(least=LEAST - MIB), (changed(-MIB, "min_budget", LEAST),)),
    ],
    ids=["within the tolerance", "less", "the smallest budget alone"],
)
def test_what_passes_is_explained_too(now: Measurement, explanation: tuple[Message, ...]) -> None:
    assert judged(now).explanation == explanation
    assert (judged(now).outcome, judged(now).exit_code) == ("passed", 0)
    assert (judged(now).reasons, judged(now).command) == ((), "")


def test_a_schedule_that_fits_no_more_is_the_heaviest_reason() -> None:
    verdict = judged(took(23 * GIB, peak=24 * GIB, least=24 * GIB, fits=False, largest=0))
    assert [reason.code for reason in verdict.reasons] == ["fits_no_more", "largest_fell", "memory_grew"]
    assert verdict.reasons[0].facts == {"micro_batch": 32, "min_budget_bytes": 24 * GIB, "limit_bytes": 23 * GIB}
    assert verdict.explanation[-1] == now_holds(0)


def test_a_largest_one_that_fell_without_a_growth_has_a_cause() -> None:
    """Two local variables more: a block is freed later, and the next does not fit into its place."""
    verdict = judged(took(least=LEAST + 294 * MIB, largest=30))
    assert verdict.reasons == (message("largest_fell", before=32, now=30),)
    assert verdict.explanation == (changed(294 * MIB, "min_budget", LEAST), now_holds(30))


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
    ("before", "now", "grown"),
    [
        ({}, {"held": 14 * GIB + 200 * MIB, "least": LEAST + 50 * MIB}, None),
        ({}, {"held": 14 * GIB + 200 * MIB, "least": LEAST + 200 * MIB}, ("min_budget", 200 * MIB)),
        ({}, {"held": 15 * GIB, "peak": 14 * GIB, "least": 14 * GIB}, None),
        (SMALL, SMALL | {"peak": 419 * MIB}, None),
        (SMALL, SMALL | {"peak": 420 * MIB}, ("peak", 20 * MIB)),
        (SMALL, SMALL | {"peak": 410 * MIB, "held": 396 * MIB}, ("peak", 10 * MIB)),
        (SMALL, SMALL | {"peak": 416 * MIB, "least": 413 * MIB}, ("peak", 16 * MIB)),
        (TIGHT, TIGHT | {"peak": 16 * GIB}, None),
        (TIGHT, TIGHT | {"peak": 16 * GIB, "least": 15 * GIB}, ("min_budget", 824 * MIB)),
    ],
    ids=[
        "held, at the same peak",
        "held and the smallest budget, at the same peak",
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
    before: dict[str, Any], now: dict[str, Any], grown: tuple[str, int] | None
) -> None:
    facts = [reason.facts for reason in judged(took(**now), took(**before)).reasons]
    assert [(grew["quantity"], grew["bytes"]) for grew in facts] == ([] if grown is None else [grown])
