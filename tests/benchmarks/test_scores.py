"""The pure parts of the scores against measured runs: no table of measurements and no library of models is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import environment
from truths.scores import Predicted, Scored, Verdict, format_misses, format_scores, score
from truths.tables import RTX3090, RTX4060, TABLES
from warm_children import WarmPython

GIB, MIB = 1 << 30, 1 << 20
ACCURACY = Path(__file__).with_name("accuracy.py")

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


def predicted(batch: int = 64, outcome: str = "ok", **changes: Any) -> Predicted:
    made = Predicted(
        batch=batch,
        outcome=outcome,
        capacity_bytes=7 * GIB,
        shown_bytes=5 * GIB,
        least_bytes=4 * GIB + 1,
        start_bytes=0,
        modules_bytes=0,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("row", "outcomes", "crashes", "timid", "right"),
    [
        ({}, ("ok", "oom"), False, False, True),
        ({}, ("tight", "oom"), False, False, True),
        ({}, ("ok", "ok"), True, False, False),
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
    ("row", "least_bytes", "outcome", "crashes", "timid", "complete"),
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
    row: dict[str, str], least_bytes: int, outcome: str, crashes: bool | None, timid: bool | None, complete: bool
) -> None:
    (case,) = RTX4060.read([{**RUN, **row}])
    verdict = RTX4060.judge(case, [predicted(399, outcome, least_bytes=least_bytes)])
    assert (verdict.would_crash, verdict.too_timid, verdict.complete) == (crashes, timid, complete)


def test_scores_count_each_kind_of_miss_and_both_signs_of_an_error() -> None:
    verdicts = [
        Verdict(would_crash=False, too_timid=False, complete=True, peak_error=-0.1, error_bytes=-MIB),
        Verdict(would_crash=True, too_timid=False, complete=True, peak_error=0.3, error_bytes=3 * MIB),
        Verdict(too_timid=True),
        Verdict(peak_error=-0.2, error_bytes=-2 * MIB),
    ]
    assert [*score("ViTs", verdicts).values()] == [
        *("ViTs", "3", "1 (33.3 %)", "1 (33.3 %)", "1 (33.3 %)", "2", "1 (50.0 %)"),
        *("3", "20.0 %", "29.0 %", "-10.0 %", "-1 MiB"),
    ]


def make_scored(row: dict[str, str], **changes: Any) -> Scored:
    (case,) = RTX3090.read([{**BRACKET, **row}])
    return Scored(case=case, **changes)


def test_a_report_has_classes_by_name_then_all_and_names_what_was_skipped() -> None:
    done = [
        make_scored({}, verdict=Verdict(would_crash=True, too_timid=False), predicted=(predicted(), predicted(96))),
        make_scored({"model": "vit_tiny"}, verdict=Verdict(would_crash=False, too_timid=False)),
        make_scored({"model": "semobilevit_s"}, unknown=True),
        make_scored({"model": "gone"}, failure="RuntimeError: no | such\nshape"),
    ]
    text = format_scores("Brackets", done)
    heading, table, unknown, failures = text.split("\n\n")
    assert heading == "### Brackets"
    assert [line.split("|")[1].strip() for line in table.splitlines()] == ["class", "-" * 7, "ResNets", "ViTs", "all"]
    assert "1 (50.0 %)" in table
    assert "median error" not in table
    assert unknown.endswith("no such model: semobilevit_s")
    assert failures.splitlines()[1:] == ["- timm_rtx3090 gone 224 1 64 96: RuntimeError: no | such shape"]
    assert [line.split(" (")[0] for line in format_misses(done)] == ["timm_rtx3090 resnet50 224 1 64 96"]


@pytest.mark.slow
def test_missing_tables_are_said_and_skipped(tmp_path: Path, warm_python: WarmPython) -> None:
    done = warm_python(tmp_path, str(ACCURACY), str(tmp_path), environment=environment())
    assert done.returncode == 3
    *missing, last = done.stderr.splitlines()
    assert missing == [f"{tmp_path / f'{name}.csv'} is missing: skipped" for name in TABLES]
    assert last == "nothing was scored: there are no such tables or rows"
