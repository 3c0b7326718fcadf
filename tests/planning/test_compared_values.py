"""Values of a parameter in one table: which rows there are, and how they are sorted, named and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from consoles import drawn
from factories import make_plan, message_at

from autoaccum.errors import UsageError
from autoaccum.planning.comparison import ComparisonRequest, find_rows
from autoaccum.planning.comparison_record import Comparison, ComparisonRow
from autoaccum.reporting.comparison_table import comparison_blocks, comparison_warnings
from autoaccum.units import GIB

MODEL = """
import torch
from torch import nn

LENGTH = 64
SIZES = (16, 16)
if LENGTH == 100:
    raise ValueError("not by 64")

def model():
    return nn.Sequential(nn.Linear(64, SIZES[0]), nn.ReLU(), nn.Linear(SIZES[0], SIZES[1]))

def batch(size):
    return torch.randn(size, LENGTH, 64)

def loss(model, x):
    return model(x).square().mean()
"""


def row_of(card: str, micro_batch: int = 16, *, world_size: int = 1, warns: bool = False, **values: Any) -> Any:
    plan = make_plan(64, micro_batch, world_size=world_size) if micro_batch else None
    warnings = (message_at("a"),) if warns else ()
    return ComparisonRow(
        card=card, overrides=values, world_size=world_size, plan=plan, limit_bytes=GIB, warnings=warnings
    )


def asked(**overrides: Any) -> ComparisonRequest:
    return ComparisonRequest(target_batch=8, gpu="t4", overrides=overrides)


def test_lists_make_combinations_and_a_tuple_is_one_value() -> None:
    request = asked(length=[1, 2], sizes=(8, 8), lora=[4, 8], dtype="bf16")
    assert request.varying == ["length", "lora"]
    assert [(values["length"], values["lora"]) for values in request.variants] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert all((values["sizes"], values["dtype"]) == ((8, 8), "bf16") for values in request.variants)
    assert asked(sizes=[[1, 2], [3, 4]]).variants == [{"sizes": [1, 2]}, {"sizes": [3, 4]}]
    assert asked(length=[1]).varying == []
    assert asked().variants == [{}]


@pytest.mark.parametrize(
    ("overrides", "seen"),
    [
        ({"length": []}, "the values of length have 0 combinations"),
        (
            {"a": list(range(9)), "b": list(range(9))},
            "the values of a and b have 81 combinations",
        ),
        ({"length": [1, b"2"]}, "length is set to b'2'"),
        ("length=1", "overrides are 'length=1'"),
    ],
)
def test_values_that_cannot_be_compared(overrides: Any, seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        ComparisonRequest(target_batch=8, gpu="t4", overrides=overrides)


def test_each_value_on_each_card_has_its_least_number_of_ranks() -> None:
    needed = {"t4 length=1": 1, "t4 length=2": 3, "l4 length=1": 1, "l4 length=2": 9}

    def plan(size: int, subjects: Sequence[str]) -> Iterator[ComparisonRow]:
        for subject in subjects:
            card, _, length = subject.partition(" length=")
            yield row_of(card, 16 * (size >= needed[subject]), world_size=size, length=length)

    table = find_rows(plan, list(needed), [1, 2, 4], lambda row: None)
    assert table.least_world_sizes == {"t4 length=1": 1, "t4 length=2": 3, "l4 length=1": 1}
    header, *lines = drawn(*comparison_blocks(table), width=200).splitlines()
    assert header.split()[:4] == ["card", "length", "ranks", "fits"]
    assert [line.split()[:3] for line in lines[:4]] == [
        ["t4", "1", "1"],
        ["t4", "2", "3"],
        ["l4", "1", "1"],
        ["l4", "2", ">"],
    ]


def test_rows_are_sorted_by_numbers_then_texts() -> None:
    request = asked(length=["4096", "None", "512", 1024])
    table = Comparison(tuple(row_of("t4", **request.varied(variant)) for variant in request.variants), {})
    assert [row.overrides["length"] for row in table.sorted_by("length").rows] == [512, 1024, 4096, None]
    assert [row["overrides"]["length"] for row in json.loads(table.to_json())["rows"]] == [4096, None, 512, 1024]


def test_a_warning_names_the_values_it_is_about() -> None:
    rows = [row_of("t4", length=1, lora=8), row_of("t4", warns=True, length=2, lora=8)]
    assert comparison_warnings(rows) == [f"on length=2 lora=8: {message_at('a')}"]
    assert comparison_warnings([*rows, row_of("l4")])[0].startswith("on t4 length=2 lora=8: ")


def test_each_row_is_the_plan_with_its_value(folder: Path, command: Command) -> None:
    words = ("model.py", "--target-batch", "64", "--memory", "30MiB", "-q", "--json", "--gpu", "t4")
    done = command(folder, "compare", *words, "--set", "LENGTH=512,60000", "--set", "SIZES=[32,8]")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["overrides"] for row in rows] == [{"LENGTH": 512}, {"LENGTH": 60000}]
    assert rows[1]["plan"] is None
    assert "micro-batch 1 does not fit" in rows[1]["message"]
    alone = json.loads(command(folder, "plan", *words, "--set", "LENGTH=512", "--set", "SIZES=[32,8]").stdout)
    for name in ("workload", "micro_batch", "iter_size", "peak_bytes", "min_budget_bytes"):
        assert rows[0]["plan"][name] == alone[name], name
    assert rows[0]["plan"]["workload"]["overrides"] == {"LENGTH": "512", "SIZES": "[32,8]"}
    assert rows[0]["update_seconds"] > 0


def test_the_value_that_the_workload_refuses_is_named(folder: Path, command: Command) -> None:
    done = command(folder, "compare", "model.py", "--target-batch", "8", "--gpu", "t4", "--set", "LENGTH=32,100")
    assert done.returncode == 2
    assert done.stdout.splitlines()[1].split()[:2] == ["32", "yes"]
    assert done.stderr.endswith("error: LENGTH=100: importing model.py raised ValueError: not by 64\n")
