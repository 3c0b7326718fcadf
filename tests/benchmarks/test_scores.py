"""The pure parts of the scores against measured runs: no table of measurements and no library of models is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from truths.scores import Predicted, Scored, Verdict, format_scores
from truths.tables import RTX3090, RTX4060, T4

GIB = 1 << 30

BRACKET = {"model": "resnet50", "img_size": "224", "channels_last": "1", "fits": "64", "fails": "96"}
RUN = {
    "family": "CNN",
    "model": "ResNet101",
    "batch": "399",
    "optimizer": "SGD",
    "gpu": "NVIDIA GeForce RTX 4060",
    "gpu_total_bytes": str(8 * GIB),
    "zero_grad_position": "",
    "ground_bytes": str(6 * GIB),
    "real_oom": "false",
    "min_cap_ok_bytes": str(5 * GIB),
    "max_cap_oom_bytes": str(4 * GIB),
}
PEAKS = {
    "model_id": "Qwen/Qwen2.5-7B",
    "batch_size": "2",
    "peak_allocated_mib": str(5 * 1024),
    "peak_reserved_mib": str(4 * 1024),
}


def predicted(batch: int, outcome: str, min_budget_bytes: int = GIB) -> Predicted:
    kept = {
        "capacity_bytes": 7 * GIB,
        "allocated_bytes": 4 * GIB,
        "shown_bytes": 5 * GIB,
        "start_bytes": 0,
        "modules_bytes": 0,
    }
    return Predicted(batch=batch, outcome=outcome, min_budget_bytes=min_budget_bytes, **kept)


@pytest.mark.parametrize(
    ("row", "outcomes", "crashes", "timid", "right"),
    [
        ({}, ("ok", "oom"), False, False, True),
        ({}, ("tight", "oom"), False, False, True),
        ({}, ("ok", "tight"), True, False, False),
        ({}, ("oom", "oom"), False, True, False),
        ({"fails": ""}, ("ok",), None, False, True),
        ({"fits": ""}, ("ok",), True, None, False),
    ],
)
def test_a_bracket_is_right_where_both_batches_do_what_they_did(
    row: dict[str, str], outcomes: tuple[str, ...], crashes: bool | None, timid: bool | None, right: bool
) -> None:
    (case,) = RTX3090.read([{**BRACKET, **row}])
    verdict = RTX3090.judge(case, [predicted(*run) for run in zip(case.batches, outcomes, strict=True)])
    assert (verdict.would_crash, verdict.too_timid, verdict.right) == (crashes, timid, right)
    assert verdict.complete == (len(outcomes) == 2)


@pytest.mark.parametrize(
    ("row", "min_budget_bytes", "outcome", "crashes", "timid", "complete"),
    [
        ({}, 4 * GIB + 1, "ok", False, False, True),
        ({}, 5 * GIB, "ok", False, False, True),
        ({}, 4 * GIB, "ok", True, False, True),
        ({}, 5 * GIB + 1, "ok", False, True, True),
        ({"min_cap_ok_bytes": ""}, 9 * GIB, "oom", False, None, False),
        ({"max_cap_oom_bytes": ""}, GIB, "ok", None, False, False),
        ({"max_cap_oom_bytes": str(5 * GIB)}, GIB, "ok", None, None, False),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 5 * GIB, "ok", True, None, False),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 8 * GIB, "oom", False, None, False),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 3 * GIB, "oom", True, None, False),
    ],
)
def test_the_least_is_right_between_the_caps(
    row: dict[str, str], min_budget_bytes: int, outcome: str, crashes: bool | None, timid: bool | None, complete: bool
) -> None:
    (case,) = RTX4060.read([{**RUN, **row}])
    verdict = RTX4060.judge(case, [predicted(399, outcome, min_budget_bytes)])
    assert (verdict.would_crash, verdict.too_timid, verdict.complete) == (crashes, timid, complete)


def test_scores_count_each_kind_of_miss_and_what_was_skipped() -> None:
    (case,) = RTX3090.read([BRACKET])
    verdicts = [
        Verdict(would_crash=False, too_timid=False, complete=True, peak_error=-0.1),
        Verdict(would_crash=True, too_timid=False, complete=True, peak_error=0.3),
        Verdict(too_timid=True),
        Verdict(peak_error=-0.2),
    ]
    done = [Scored(case=case, verdict=verdict) for verdict in verdicts]
    failed = Scored(case=case, failure="RuntimeError: no | such\nshape")
    text = format_scores("Brackets", [*done, Scored(case=replace(case, model="gone"), unknown=True), failed])
    heading, table, unknown, failures, misses = text.split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    counts = ["3", "1 of 3 (33.3 %)", "1 of 3 (33.3 %)", "1 of 3 (33.3 %)", "1 of 2 (50.0 %)", "3", "20.0 %", "29.0 %"]
    assert heading == "### Brackets"
    assert rows[2:] == [["ResNets", *counts], ["all", *counts]]
    assert unknown.endswith("no such model: gone")
    assert failures.splitlines()[1:] == [f"- {case.label}: RuntimeError: no | such shape"]
    assert [line.partition(" (ResNets): ")[2][:11] for line in misses.splitlines()] == ["would crash", "too timid ("]


def test_both_peaks_are_told_by_row_where_both_were_measured() -> None:
    (case,) = T4.read([PEAKS])
    scored = Scored(case=case, verdict=T4.judge(case, [predicted(2, "ok")]))
    _, table, line = format_scores("Peaks", [scored]).split("\n\n")
    cells = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    assert cells[-4:] == ["25.0 %", "25.0 %", "20.0 %", "20.0 %"]
    assert line.startswith("allocated -20.000 %, reserved +25.00 %: fitcheck_t4_dev Qwen/Qwen2.5-7B")
