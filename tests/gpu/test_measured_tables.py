"""Measurements of cards are committed in a form that can be read and summed up.

Where nothing was, the run says so (`tests/conftest.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.summary import least_errors, peak_errors, summarise
from tests.gpu.table import DATA, SECTIONS, read_table

TABLES = sorted(DATA.glob("*.json"))
BLOCK = {"rule", "numbers", "measured_bytes", "predicted_bytes", "band_bytes"}


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem) for path in TABLES] or [pytest.param(None, marks=pytest.mark.no_table)]
)
def test_a_committed_table_is_of_a_real_card(path: Path) -> None:
    check(read_table(path))


def check(record: dict[str, Any]) -> None:
    assert record["about"]["place"] == "cuda"
    for row in record["comparison"].values():
        if "error" not in row:
            assert row["measured"]["peak_reserved_bytes"] >= row["measured"]["peak_allocated_bytes"] > 0
            assert row["simulated"]["peak_reserved_bytes"] > 0
    for row in record["constants"].values():
        for block in row.get("rows", ()):
            assert set(block) == BLOCK
            assert block["measured_bytes"] is not None
    assert summarise(record)


def example() -> dict[str, Any]:
    """Three workloads on a card that never was: what is predicted is 0, 2 and 10 % high."""

    def row(predicted: int, least: int) -> dict[str, Any]:
        peaks = {"peak_allocated_bytes": predicted, "peak_reserved_bytes": predicted}
        measured = {"peak_allocated_bytes": 1000, "peak_reserved_bytes": 1000}
        return {
            "simulated": {**peaks, "least_bytes": least},
            "measured": {**measured, "least": {"ran_bytes": 800, "failed_bytes": 790, "trials": 2}},
        }

    block = {"rule": "sort", "numbers": [1], "predicted_bytes": 8, "band_bytes": 4}
    blocks = [{**block, "measured_bytes": measured} for measured in (8, 10, 90)]
    return {
        "schema": 1,
        "about": {"place": "cuda", "card": "a card", "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900},
        **{name: {} for name in SECTIONS},
        "comparison": {"a": row(1000, 795), "b": row(1020, 816), "c": row(1100, 700), "d": {"error": "no"}},
        "constants": {"sort: x": {"rows": blocks, "measured_peak_bytes": 1, "predicted_peak_bytes": 1}},
    }


def test_summary() -> None:
    check(example())
    told = summarise(example())
    assert "sort: 1 of 3 exact, 1 outside of their band; worst 8 for 90 (sort: x)" in told
    assert "peak allocated: median error 2.00%, 95th percentile 9.20% of 3; worst +10.00% (c)" in told
    assert told[-1] == "rows that failed: comparison: d"


def test_errors_have_signs() -> None:
    rows = {title: row for title, row in example()["comparison"].items() if "error" not in row}
    assert peak_errors(rows, "peak_reserved_bytes") == {"a": 0.0, "b": 0.02, "c": 0.1}
    assert least_errors(rows) == {"a": 0.0, "b": 0.02, "c": -0.1125}
