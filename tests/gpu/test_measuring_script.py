"""The script goes on from where it was, says what failed, predicts without a card, and fills every section on one.

Measurements of cards are committed in a form that can be summed up; where none are, `tests/conftest.py` says so.
"""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import Tracer
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.simulation.cards import find_card
from autoaccum.units import GIB, MIB
from tests.gpu.comparison import CASES, GRAIN_BYTES, MOST_TRIALS, TOLERANCE, Case, find_least, measure, predict
from tests.gpu.constants import UNEXPLAINED, Measured, align, compare_operation, number_blocks
from tests.gpu.measure import main, measure_rows
from tests.gpu.simulated_operations import TENSOR, Expected, Simulated
from tests.gpu.table import DATA, SECTIONS, Table, least_errors, peak_errors, read_table, summarise
from tests.gpu.training_runs import COLUMNS, list_runs

OPERATION = "constants: reduction: sum(0) of 1024 x 768 fp32"
CASE = "lstm_fp32_sgd 64"
BLOCK = {"rule", "numbers", "measured_bytes", "predicted_bytes", "uncertainty_bytes"}
CARD = find_card("rtx3090")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_each_section_has_rows(place: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table.json"
    matched = "|".join((OPERATION, "probes: ", f"comparison: {CASE}")).replace("(0)", ".0.")
    main(["-o", str(output), "--device", str(place), "--size", "2", "--match", matched])
    assert "rows that failed: none" in capsys.readouterr().out
    record = read_table(output)
    assert record["about"]["place"] == place.type
    assert set(record["probes"]) == {"context", "growth"}
    assert record["comparison"][CASE]["measured"]["peak_reserved_bytes"] > 0
    block, *_ = record["constants"][OPERATION.partition(": ")[2]]["rows"]
    assert block["rule"] == "reduction"
    assert (block["measured_bytes"] is not None) == (place.type == "cuda")


@pytest.mark.parametrize(
    "name", ["lstm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "gpt", "vit", "bert"))]
)
@pytest.mark.usefixtures("warm_children")
def test_predictions_need_no_card(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(case for case in CASES if case.name.startswith(name))
    words = ["--gpu", "rtx3090", "--match", f"comparison: {first.title}", "--size", "2"]
    main(["-o", str(tmp_path / "rtx3090.json"), *words])
    record = read_table(tmp_path / "rtx3090.json")
    row = record["comparison"][first.title]
    assert row["measured"] is None
    assert row["simulated"]["min_budget_bytes"] <= row["simulated"]["peak_reserved_bytes"]
    assert record["about"]["place"] == "none"
    assert "peaks predicted without a measurement: 1" in capsys.readouterr().out


@pytest.mark.without_gpu
def test_without_a_card_it_says_how_to_predict(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="predict with --gpu NAME"):
        main(["-o", str(tmp_path / "card.json")])


def table(folder: Path) -> Table:
    return Table(folder / "table.json", {"card": "a card", "total_bytes": 5})


def fail(message: str = "no kernel\nand more") -> dict[str, Any]:
    raise RuntimeError(message)


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
    assert "and more" in read_table(tmp_path / "table.json")["constants"]["two"]["traceback"]
    again = [("constants", "one", fail), ("constants", "two", lambda: make("two"))]
    measure_rows(again, table(tmp_path), 60, again=True)
    assert made == ["one", "two"]
    measure_rows([("comparison", "four", fail)], table(tmp_path), -1)
    assert "go on from comparison: four" in capsys.readouterr().out


def test_a_dead_context_ends_the_process(tmp_path: Path) -> None:
    die = partial(fail, "CUDA error: device-side assert triggered")
    with pytest.raises(SystemExit, match="fresh process"):
        measure_rows([("comparison", "one", die), ("comparison", "two", fail)], table(tmp_path), 60)
    assert set(read_table(tmp_path / "table.json")["comparison"]) == {"one"}


@given(needed=st.integers(2 * MIB, 8 * GIB), slack=st.floats(1, 1.5), guessed=st.floats(0.5, 1.5))
def test_the_least_lies_between_what_failed_and_what_ran(needed: int, slack: float, guessed: float) -> None:
    asked: list[int] = []
    most, guess = int(needed * slack), int(needed * guessed)

    def runs(limit: int) -> bool:
        asked.append(limit)
        return limit >= needed

    least = find_least(runs, guess, most)
    assert least["failed_bytes"] < needed <= least["ran_bytes"] <= most + GRAIN_BYTES
    assert least["trials"] == len(set(asked)) == len(asked) <= MOST_TRIALS
    assert all(limit % GRAIN_BYTES == 0 for limit in asked)
    if least["trials"] < MOST_TRIALS:
        assert least["ran_bytes"] - least["failed_bytes"] <= max(GRAIN_BYTES, guess * TOLERANCE)


@pytest.mark.usefixtures("warm_children")
def test_the_same_card_once_more_is_measured_as_predicted() -> None:
    case = Case("lstm_fp32_sgd", 64)
    predicted = predict(case, CARD)
    traces = TraceCache(partial(Tracer, case.settings, CARD), 2 * case.size)
    with SimulatedDevice(CARD, traces, torch_version=read_torch_release()) as device:
        measured = measure(case, device, predicted)
    rows = {case.title: {"simulated": predicted, "measured": measured}}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert peak_errors(rows, name) == {case.title: 0.0}
    assert least_errors(rows) == {case.title: 0.0}
    assert measured["least"]["trials"] <= 3


sizes = st.lists(st.sampled_from([0, 512, 1024, 4096]), max_size=12)


@given(expected=sizes, measured=st.lists(st.sampled_from([512, 700, 4096]), max_size=12))
def test_no_block_is_lost_or_paired_twice(expected: list[int], measured: list[int]) -> None:
    blocks = [Expected(TENSOR, (number,), size) for number, size in enumerate(expected)]
    pairs = align(blocks, measured)
    assert sorted(block.numbers for block, _ in pairs if block is not None) == [block.numbers for block in blocks]
    assert [size for _, size in pairs if size is not None] == measured


def test_rows_of_an_operation() -> None:
    workspace, flags = Expected("reduction", (4, 2), 6000), Expected("reduction_flags", (4, 2), 0, 16)
    simulated = Simulated("reduction: x", (workspace, flags, Expected(TENSOR, (), 1024)), peak_bytes=7 * 1024)
    row = compare_operation(simulated, Measured([6000, 1024, 80], peak_bytes=9000))
    assert (row["predicted_peak_bytes"], row["measured_peak_bytes"]) == (7 * 1024, 9000)
    assert [(each["rule"], each["measured_bytes"], each["predicted_bytes"]) for each in row["rows"]] == [
        ("reduction", 6000, 6000),
        ("reduction_flags", 0, 0),
        (UNEXPLAINED, 80, 0),
    ]
    unmeasured = compare_operation(simulated, None)
    assert [each["measured_bytes"] for each in unmeasured["rows"]] == [None, None]
    unknown = compare_operation(Simulated("indexing: nonzero", error="no"), Measured([512], peak_bytes=512))
    assert (unknown["not_simulated"], [each["rule"] for each in unknown["rows"]]) == ("no", [UNEXPLAINED])


def test_blocks_of_a_record_are_numbered_and_those_from_before_left_out() -> None:
    record = [("alloc", 64, 700), ("alloc", 99, 800), ("free_completed", 64, 700), ("free_completed", 7, 5)]
    entries = [{"action": action, "addr": address, "size": size} for action, address, size in record]
    assert number_blocks(entries) == ([0, 1, ~0], [700, 800])


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("*.json")) or [pytest.param(None, marks=pytest.mark.no_table)], ids=str
)
def test_a_committed_table_is_of_a_real_card(path: Path) -> None:
    check(read_table(path))


@pytest.mark.parametrize("path", sorted(DATA.glob("*_runs.csv")), ids=str)
def test_committed_runs_are_those_of_the_script(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    assert set(rows[0]) == set(COLUMNS)
    known = [{name: str(value) for name, value in run.items()} for run in list_runs()]
    for row in rows:
        assert {name: row[name] for name in COLUMNS[:9] if row[name]} in known
        peaks = [int(row[f"peak_{phase}"]) for phase in ("forward", "backward", "optimizer")]
        assert int(row["peak_reserved"]) >= max(peaks) > int(row["loaded_allocated"]) > 0


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


def test_summary() -> None:
    """Of three workloads on a card that never was: what is predicted is 0, 2 and 10 % high."""

    def row(predicted: int, least: int) -> dict[str, Any]:
        peaks = {"peak_allocated_bytes": predicted, "peak_reserved_bytes": predicted}
        measured = {"peak_allocated_bytes": 1000, "peak_reserved_bytes": 1000}
        found = {"ran_bytes": 800, "failed_bytes": 790, "trials": 2}
        return {"simulated": {**peaks, "min_budget_bytes": least}, "measured": {**measured, "least": found}}

    blocks = [
        {**dict.fromkeys(BLOCK, 4), "rule": "sort", "predicted_bytes": 8, "measured_bytes": n} for n in (8, 10, 90)
    ]
    rows = {"a": row(1000, 795), "b": row(1020, 816), "c": row(1100, 700)}
    record = {
        "schema": 1,
        "about": {"place": "cuda", "card": "a card", "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900},
        **{name: {} for name in SECTIONS},
        "comparison": {**rows, "d": {"error": "no"}},
        "constants": {"sort: x": {"rows": blocks}},
    }
    check(record)
    told = summarise(record)
    assert "sort: 1 of 3 exact, 1 outside of their band; worst 8 for 90 (sort: x)" in told
    assert "peak allocated: median error 2.00%, 95th percentile 9.20% of 3; worst +10.00% (c)" in told
    assert told[-1] == "rows that failed: comparison: d"
    assert least_errors(rows) == {"a": 0.0, "b": 0.02, "c": -0.1125}
