"""The script goes on from where it was, says what failed, predicts without a card, and fills every section on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.measure import main, measure_rows
from tests.gpu.table import Table, read_table

OPERATION = "constants: reduction: sum(0) of 1024 x 768 fp32"


@pytest.mark.usefixtures("warm_children")
def test_predictions_need_no_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["-o", str(tmp_path / "rtx3090.json"), "--gpu", "rtx3090", "--match", "lstm fp32_sgd (64|256)"])
    told = capsys.readouterr().out
    record = read_table(tmp_path / "rtx3090.json")
    assert list(record["comparison"]) == ["lstm fp32_sgd 64", "lstm fp32_sgd 256"]
    for row in record["comparison"].values():
        assert row["measured"] is None
        assert row["simulated"]["least_bytes"] <= row["simulated"]["peak_reserved_bytes"]
    assert record["about"]["place"] == "none"
    assert "peaks predicted without a measurement: 2" in told


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_each_section_has_rows(place: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table.json"
    rows = (OPERATION, "probes: ", "comparison: lstm fp32_sgd 64")
    matched = "|".join(rows).replace("(0)", ".0.")
    main(["-o", str(output), "--device", str(place), "--size", "2", "--match", matched])
    assert "rows that failed: none" in capsys.readouterr().out
    record = read_table(output)
    assert set(record["probes"]) == {"context", "growth"}
    ran = record["comparison"]["lstm fp32_sgd 64"]["measured"]
    assert ran["peak_reserved_bytes"] > 0
    block, *_ = record["constants"][OPERATION.partition(": ")[2]]["rows"]
    assert block["rule"] == "reduction"
    on_card = place.type == "cuda"
    assert (block["measured_bytes"] is not None) == on_card
    assert record["about"]["place"] == place.type


@pytest.mark.without_gpu
def test_without_a_card_it_says_how_to_predict(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="predict with --gpu NAME"):
        main(["-o", str(tmp_path / "card.json")])


def table(folder: Path, card: str = "a card", total_bytes: int = 5) -> Table:
    return Table(folder / "table.json", {"card": card, "total_bytes": total_bytes})


def fail() -> dict[str, Any]:
    raise RuntimeError("no kernel\nand more")


def test_what_is_there_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def make(title: str) -> dict[str, Any]:
        made.append(title)
        return {"value": 1}

    jobs = [("constants", "one", lambda: make("one")), ("constants", "two", fail), ("comparison", "three", fail)]
    measure_rows(jobs, table(tmp_path), 60)
    measure_rows(jobs, table(tmp_path), 60)
    assert made == ["one"]
    assert "constants: two: RuntimeError: no kernel" in capsys.readouterr().out
    record = read_table(tmp_path / "table.json")
    assert "and more" in record["constants"]["two"]["traceback"]
    again = [("constants", "one", fail), ("constants", "two", lambda: make("two"))]
    measure_rows(again, table(tmp_path), 60, again=True)
    assert made == ["one", "two"]
    assert "error" not in read_table(tmp_path / "table.json")["constants"]["one"]


def test_no_row_is_begun_when_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure_rows([("comparison", "one", fail)], table(tmp_path), -1)
    assert "go on from comparison: one" in capsys.readouterr().out
    assert not (tmp_path / "table.json").exists()


def test_a_dead_context_ends_the_process(tmp_path: Path) -> None:
    def die() -> dict[str, Any]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(SystemExit, match="fresh process"):
        measure_rows([("comparison", "one", die), ("comparison", "two", fail)], table(tmp_path), 60)
    assert set(read_table(tmp_path / "table.json")["comparison"]) == {"one"}
