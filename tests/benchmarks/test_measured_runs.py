"""Runs of users, predicted: tests/shared/real_allocator/measured_run.json is what a user would send.

`autoaccum/devices/measured_run.py` recorded it with torch 2.14.1 on the fake RTX 3090 of that folder, whose name was
put into it. No kernel ran there, but every request is that of PyTorch's own code to its own allocator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accuracy import read_rows, score_case
from truths.measured_runs import find_runs
from truths.scores import FITS, Score
from truths.tables import MEASURED

RECORD = Path(__file__).parents[1] / "shared" / "real_allocator" / "measured_run.json"


def scores_of(folder: Path, *, run_scripts: bool = True, **changes: Any) -> list[Score]:
    """Those of the recorded run with some fields changed; `card` and `update` change single fields of these."""
    record = json.loads(RECORD.read_text())
    record["card"] |= changes.pop("card", {})
    record["updates"][-1] |= changes.pop("update", {})
    (folder / "run.json").write_text(json.dumps(record | changes))
    (case,) = MEASURED.read(list(find_runs(folder, run_scripts=run_scripts)))
    assert (case.model, case.run, case.batches) == ("small.py", "8 256 (run.json)", (8,))
    return score_case(case)


def test_a_run_is_predicted_to_the_byte(tmp_path: Path) -> None:
    scores = {score.quantity: score for score in scores_of(tmp_path, card={"in_use_before_bytes": 0})}
    assert {*scores} == {FITS, "allocated", "reserved", "process", "forward", "backward", "update"}
    assert all(scores[name].error() == 0 for name in ("allocated", "reserved", "forward", "backward", "update"))
    assert scores["allocated"].note == "", "each request is the recorded one"
    assert scores["allocated"].card == "NVIDIA GeForce RTX 3090"


def test_another_run_is_told_by_the_request_that_differs(tmp_path: Path) -> None:
    script = json.loads(RECORD.read_text())["script"].replace("4096", "5120")
    score = next(score for score in scores_of(tmp_path, script=script) if score.quantity == "allocated")
    assert (score.error() or 0) > 0.1
    assert score.note == "request 10 of 74 was of 2.0 MiB, predicted: 2.5 MiB", "bf16 weights of the last layer"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"run_scripts": False},
            "its command would be run: read it and its script in the file first, and add --run-scripts",
        ),
        (
            {"run_scripts": False, "script": None, "module": True},
            "its command would be run: read it and its script in the file first, and add --run-scripts",
        ),
        ({"script": None}, "small.py is not here: run this where it lies, or measure with --include-script"),
        ({"world_size": 2}, "only runs of one process on one card are predicted"),
        ({"card": {"cards_used": 2}}, "only runs of one process on one card are predicted"),
        ({"allocator": {"backend": "cudaMallocAsync"}}, "the allocator cudaMallocAsync is not simulated"),
        ({"update": {"ooms": 1}}, "the script ran out of memory, caught that, and went on"),
    ],
)
def test_what_is_not_predicted_says_why(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (score,) = scores_of(tmp_path, **changes)
    assert (score.quantity, score.note) == ("", said)


def test_files_that_are_no_runs_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run.json", "h100_runs.csv"):
        (tmp_path / name).write_bytes(b"\xff\xfe{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "damaged.json").write_text(json.dumps(json.loads(RECORD.read_text()) | {"card": None}))
    (tmp_path / "plan.json").write_text('{"kind": "predicted"}')
    assert [read_rows(tmp_path, name, run_scripts=False) for name in ("measured_runs", "h100_runs")] == [[], []]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        f"{tmp_path}/damaged.json is no run that can be read",
        f"{tmp_path}/deep.json is not JSON in UTF-8",
        f"{tmp_path}/run.json is not JSON in UTF-8",
        f"{tmp_path}/h100_runs.csv is not text in UTF-8",
    ]
