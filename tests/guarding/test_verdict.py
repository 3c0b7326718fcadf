"""The outcome: what is worse than it may be, what is good news, and what says nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import guard_reports
import pytest
from guard_reports import CASE

from autoaccum.devices.explanation import Holding
from autoaccum.guarding.guard_result import Measurement, Tolerance, Verdict
from autoaccum.guarding.verdict import compare
from autoaccum.units import GIB, MIB

UPDATE = "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update"
BEFORE = dataclasses.replace(
    guard_reports.BEFORE,
    parameters=124_439_808,
    peak_bytes=15 * GIB,
    held_bytes=14 * GIB,
    least_bytes=14 * GIB + 200 * MIB,
    phase="backward",
    categories={"optimizer_state": 2 * GIB, "activations": 12 * GIB, "unused": GIB},
    holdings=(
        Holding(category="optimizer_state", module="head", kind="Linear", dtype="float32", bytes=2 * GIB),
        Holding(
            category="activations", module="blocks.0.mlp", kind="MLP", dtype="bfloat16", op="aten.mm", bytes=12 * GIB
        ),
    ),
)


def grown(bytes_: int, *, unused: int = 0, dtype: str = "bfloat16", **other: Any) -> Measurement:
    """`BEFORE` with more activations, and more that is unused."""
    state, activations = BEFORE.holdings
    return dataclasses.replace(
        BEFORE,
        peak_bytes=BEFORE.peak_bytes + bytes_ + unused,
        held_bytes=14 * GIB + bytes_,
        categories={"optimizer_state": 2 * GIB, "activations": 12 * GIB + bytes_, "unused": GIB + unused},
        holdings=(state, dataclasses.replace(activations, bytes=activations.bytes + bytes_, dtype=dtype)),
        **other,
    )


def judged(now: Measurement, before: Measurement = BEFORE, tolerance: Tolerance | None = None) -> Verdict:
    return compare(CASE, before, now, tolerance or Tolerance(), command=UPDATE)


def test_the_same_to_the_byte_is_unchanged() -> None:
    verdict = judged(BEFORE)
    assert (verdict.outcome, verdict.exit_code, verdict.reasons) == ("unchanged", 0, ())
    assert (verdict.explanation, verdict.hint, verdict.growths) == ("", "", ())


def test_a_growth_is_reported_with_what_fits_now() -> None:
    now = grown(1274 * MIB, unused=20 * MIB, dtype="float32", largest=24)
    verdict = judged(now)
    assert (verdict.outcome, verdict.exit_code) == ("regressed", 1)
    assert verdict.explanation == (
        "+1.26 GiB (+8.4 %): activations of blocks.0.mlp +1.24 GiB (bf16 -> fp32); rtx3090 now holds 24 instead of 32"
    )
    assert verdict.reasons == (
        "the largest micro-batch that fits fell from 32 to 24",
        "the peak grew by 1.26 GiB (8.4 %), 1 % is allowed",
    )
    assert (verdict.hint, verdict.command) == ("if it is meant, lock it in", UPDATE)


def test_growth_within_the_tolerance_passes_and_is_reported() -> None:
    verdict = judged(grown(100 * MIB))
    assert (verdict.outcome, verdict.exit_code, verdict.reasons) == ("within", 0, ())
    assert verdict.explanation == "+100 MiB (+0.7 %): activations of blocks.0.mlp +100 MiB"


def test_what_is_held_counts_where_the_peak_is_as_it_was() -> None:
    verdict = judged(grown(200 * MIB, unused=-200 * MIB))
    assert verdict.outcome == "regressed"
    assert verdict.reasons == ("what is held at the peak grew by 200 MiB (1.4 %), 1 % is allowed",)
    assert verdict.explanation.startswith("+200 MiB (+1.4 %) held at the peak: activations of blocks.0.mlp")


def test_less_than_a_segment_of_the_allocator_counts_only_if_it_is_held() -> None:
    small = dataclasses.replace(BEFORE, peak_bytes=400 * MIB, held_bytes=390 * MIB)
    assert judged(dataclasses.replace(small, peak_bytes=419 * MIB), small).outcome == "within"
    assert judged(dataclasses.replace(small, peak_bytes=420 * MIB), small).outcome == "regressed"
    assert judged(dataclasses.replace(small, peak_bytes=410 * MIB, held_bytes=396 * MIB), small).outcome == "regressed"


def test_a_schedule_that_fits_no_more_is_the_heaviest_reason() -> None:
    verdict = judged(grown(9 * GIB, fits=False, largest=0, least_bytes=24 * GIB))
    assert verdict.outcome == "regressed"
    assert (
        verdict.reasons[0]
        == "micro-batch 32 does not fit any more: it needs at least 24.00 GiB, 23.00 GiB are available"
    )
    assert len(verdict.reasons) == 3
    assert verdict.explanation.endswith("; rtx3090 now holds none instead of 32")


def test_a_smaller_largest_size_is_a_no_whatever_the_peak() -> None:
    verdict = judged(grown(10 * MIB, largest=31))
    assert (verdict.outcome, verdict.exit_code) == ("regressed", 1)
    assert verdict.reasons == ("the largest micro-batch that fits fell from 32 to 31",)


@pytest.mark.parametrize(
    ("tolerance", "least"),
    [(Tolerance(), 2622), (Tolerance(0.5), 1324), (Tolerance(None, 150 * MIB), 2623), (Tolerance(0.0), 2648)],
    ids=str,
)
def test_a_large_one_may_fall_by_the_tolerances_share_of_it(tolerance: Tolerance, least: int) -> None:
    before = dataclasses.replace(BEFORE, largest=2648)
    assert judged(dataclasses.replace(before, largest=least), before, tolerance).exit_code == 0
    assert judged(dataclasses.replace(before, largest=least - 1), before, tolerance).exit_code == 1


def test_a_largest_one_that_fell_without_a_growth_has_a_cause() -> None:
    """Two local variables more: a block is freed later, and the next does not fit into its place."""
    verdict = judged(dataclasses.replace(BEFORE, largest=30, least_bytes=(BEFORE.least_bytes or 0) + 294 * MIB))
    assert verdict.outcome == "regressed"
    assert verdict.explanation == ("+294 MiB (+2.0 %) of the least budget; rtx3090 now holds 30 instead of 32")
    verdict = judged(dataclasses.replace(BEFORE, least_bytes=(BEFORE.least_bytes or 0) - MIB))
    assert verdict.outcome == "within"
    assert verdict.explanation == "-1.0 MiB (-0.007 %) of the least budget"


class TestContradictions:
    """The peak, the bytes held and the least budget may disagree."""

    def test_a_peak_is_believed_if_the_least_budget_says_so_too(self) -> None:
        small = dataclasses.replace(BEFORE, peak_bytes=308 * MIB, held_bytes=290 * MIB, least_bytes=300 * MIB)
        now = dataclasses.replace(small, peak_bytes=324 * MIB, held_bytes=272 * MIB, least_bytes=318 * MIB)
        verdict = judged(now, small)
        assert verdict.outcome == "regressed"
        assert verdict.reasons == ("the peak grew by 16.0 MiB (5.2 %), 1 % is allowed",)

    def test_of_peaks_that_no_card_holds_the_least_budgets_tell(self) -> None:
        there: dict[str, Any] = {"limit_bytes": 14 * GIB + 300 * MIB}
        before = dataclasses.replace(BEFORE, **there)
        now = grown(0, unused=GIB, **there)
        assert judged(now, before).outcome == "within"
        assert judged(dataclasses.replace(now, least_bytes=14 * GIB), before).outcome == "improved"
        more = dataclasses.replace(now, least_bytes=15 * GIB)
        assert judged(more, before).reasons == ("the least budget grew by 824 MiB (5.7 %), 1 % is allowed",)

    def test_what_is_held_is_no_fault_where_less_is_needed(self) -> None:
        now = grown(GIB, unused=-2 * GIB)
        assert judged(now).outcome == "regressed"
        assert judged(dataclasses.replace(now, least_bytes=14 * GIB)).outcome == "within"

    @pytest.mark.parametrize("larger", [{"peak_bytes": 16 * GIB}, {"least_bytes": 16 * GIB}, {"held_bytes": 16 * GIB}])
    def test_nothing_is_good_news_where_anything_grew(self, larger: dict[str, Any]) -> None:
        less: dict[str, Any] = {"peak_bytes": 13 * GIB, "least_bytes": 12 * GIB, "held_bytes": 11 * GIB}
        assert judged(dataclasses.replace(BEFORE, **less, largest=64)).outcome == "improved"
        assert judged(dataclasses.replace(BEFORE, **less | larger, largest=64)).outcome in ("within", "regressed")


@pytest.mark.parametrize(
    "now", [grown(-GIB), grown(-GIB, unused=GIB), dataclasses.replace(BEFORE, largest=33)], ids=["peak", "held", "fits"]
)
def test_less_is_good_news_with_the_command_that_locks_it_in(now: Measurement) -> None:
    verdict = judged(now)
    assert (verdict.outcome, verdict.exit_code, verdict.reasons) == ("improved", 0, ())
    assert (verdict.hint, verdict.command) == ("lock it in", UPDATE)


def test_shrinkage_is_explained_from_what_shrank() -> None:
    explanation = judged(grown(-2 * GIB, largest=40)).explanation
    assert explanation == (
        "-2.00 GiB (-13.3 %): activations of blocks.0.mlp -2.00 GiB; rtx3090 now holds 40 instead of 32"
    )
