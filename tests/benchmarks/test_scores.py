"""The scores against measured runs, and the pages that publish them: no measurements and no models are needed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from truths.documents import PAGES, PICTURE, draw, fill, format_table, load_all
from truths.scores import FITS, Predicted, Score, Scores, errors_of, judge_limits, load, order_and_slope, save
from truths.tables import L40S, RTX3090, RTX4060, T4, Table

MIB, GIB = 1 << 20, 1 << 30

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
METHOD = {
    "table": "MetaMathQA",
    "model_id": "meta-llama/Llama-3.2-3B",
    "batch_size": "4",
    "accelerator_memory_reserved_99th": str(4 * GIB),
}


def predicted(batch: int, outcome: str, min_budget_bytes: int = GIB) -> Predicted:
    return Predicted(
        batch=batch,
        outcome=outcome,
        capacity_bytes=7 * GIB,
        phases_bytes={},
        shown_bytes=5 * GIB,
        min_budget_bytes=min_budget_bytes,
        start_bytes=0,
        modules_bytes=0,
    )


def compare(table: Table, row: dict[str, str], *runs: Predicted) -> list[Score]:
    (case,) = table.read([row])
    assert case.batches == tuple(run.batch for run in runs)
    return list(table.compare(case, runs))


@pytest.mark.parametrize(
    ("row", "outcomes", "crashes", "timid"),
    [
        ({}, ("ok", "oom"), 0, 0),
        ({}, ("tight", "oom"), 0, 0),
        ({}, ("ok", "tight"), 1, 0),
        ({}, ("oom", "oom"), 0, 1),
        ({}, ("oom", "ok"), 1, 1),
        ({"fails": ""}, ("ok",), 0, 0),
        ({"fits": ""}, ("ok",), 1, 0),
    ],
)
def test_a_bracket_is_right_where_both_batches_do_what_they_did(
    row: dict[str, str], outcomes: tuple[str, ...], crashes: int, timid: int
) -> None:
    batches = [int((BRACKET | row)[side]) for side in ("fits", "fails") if (BRACKET | row)[side]]
    scores = compare(RTX3090, BRACKET | row, *map(predicted, batches, outcomes))
    counts = judge_limits(scores)
    assert (counts.runs, counts.right) == (1, int(not crashes and not timid))
    assert (counts.would_crash, counts.too_timid) == (crashes, timid)
    assert judge_limits(scores, both_sides=True).runs == (len(batches) == 2)


@pytest.mark.parametrize(
    ("row", "min_budget_bytes", "outcome", "limits", "crashes", "timid"),
    [
        ({}, 4 * GIB + 1, "ok", 2, 0, 0),
        ({}, 5 * GIB, "ok", 2, 0, 0),
        ({}, 4 * GIB, "ok", 2, 1, 0),
        ({}, 5 * GIB + 1, "ok", 2, 0, 1),
        ({"min_cap_ok_bytes": ""}, 9 * GIB, "oom", 1, 0, 0),
        ({"max_cap_oom_bytes": ""}, GIB, "ok", 1, 0, 0),
        ({"max_cap_oom_bytes": str(5 * GIB)}, GIB, "ok", 0, 0, 0),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 5 * GIB, "ok", 1, 1, 0),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 8 * GIB, "oom", 1, 0, 0),
        ({"real_oom": "true", "min_cap_ok_bytes": ""}, 3 * GIB, "oom", 1, 1, 0),
    ],
)
def test_the_least_is_right_between_the_caps(
    row: dict[str, str], min_budget_bytes: int, outcome: str, limits: int, crashes: int, timid: int
) -> None:
    scores = compare(RTX4060, RUN | row, predicted(399, outcome, min_budget_bytes))
    counts = judge_limits(scores)
    assert len([score for score in scores if score.quantity == FITS]) == limits
    assert (counts.runs, counts.would_crash, counts.too_timid) == (int(limits > 0), crashes, timid)
    assert (errors_of(scores, "growth of the process") is None) == ("real_oom" in row)


def test_methods_are_judged_by_order_and_slope() -> None:
    scores = [
        replace(compare(L40S, METHOD | {"experiment": str(number)}, predicted(4, "ok"))[0], predicted=value)
        for number, value in enumerate((2000.0, 3000.0, 3000.0, 5000.0))
    ]
    scores = [replace(score, measured=100 + 0.5 * (score.predicted or 0)) for score in scores]
    found = order_and_slope(scores)
    assert found is not None
    assert found == pytest.approx((4, 1.0, 0.5))
    assert order_and_slope(scores[:2]) is None
    assert errors_of(scores, scores[0].quantity) is None


def test_scores_are_kept_as_they_are_and_told_with_what_was_not_predicted(tmp_path: Path) -> None:
    kept = Score(table="t", card="Tesla T4", group="NF4", model="qwen", run="2 x 512", quantity="process")
    known = [replace(kept, measured=1000.0, predicted=value, fitcheck=1100.0) for value in (1010.0, 980.5)]
    gone = replace(kept, quantity="", note="no such model")
    timid = replace(kept, quantity=FITS, measured=1.0, predicted=0.0, note="needs 9 of 8 MiB")
    save(tmp_path / "t.csv", Scores("of today", [*known, gone, timid]))
    scores = load(tmp_path / "t.csv")
    assert scores == Scores("of today", [*known, gone, timid])
    text = format_table("Runs", scores)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert ["NF4", "process", "2", "1.5 %", "1.9 %", "1.9 %"] in cells
    assert ["process", "fitcheck", "2", "10.0 %", "10.0 %", "10.0 %"] in cells
    assert "- no such model: qwen, 2 x 512" in text
    assert "- qwen, 2 x 512: too timid (needs 9 of 8 MiB)" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(page.parents[len(page.parents) - 2])))
def test_pages_say_what_the_scores_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- scores: " in text
    assert fill(text, load_all()) == text, "run: python tests/benchmarks/accuracy.py"


def test_the_picture_shows_the_scores() -> None:
    """By its points and its words, since releases of matplotlib place them differently."""

    def shown(svg: str) -> tuple[int, list[str]]:
        return svg.count("<use "), re.findall(r"<text[^>]*>([^<]*)<", svg)

    assert shown(PICTURE.read_text(encoding="utf-8")) == shown(draw(load_all()).decode())


def test_a_row_of_lora_is_named_by_what_differs() -> None:
    row = {"model_id": "Qwen/Qwen2.5-7B", "batch_size": "2", "seq_len": "1024", "quantization": "nf4"}
    (case,) = T4.read([row | {"attn_impl": "sdpa", "session": "sweep", "repeat": ""}])
    assert (case.model, case.run, case.group) == ("Qwen/Qwen2.5-7B", "NF4 sdpa 2 x 1024, sweep", "NF4, sdpa")
