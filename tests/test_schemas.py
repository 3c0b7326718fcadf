"""The JSON schemas that are shipped are those of the records, take what autoaccum writes, and refuse what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_plan, make_token_budget, message_at
from json_schemas import FOLDER, MAKERS, faults, schema_text
from small_locks import WHOLE, a_case, a_lock

from autoaccum.guarding.lock import write_lock


@pytest.mark.parametrize("name", MAKERS)
def test_the_shipped_schemas_are_those_of_the_records(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == schema_text(name), "run python -m json_schemas"
    assert {path.stem for path in FOLDER.iterdir()} == MAKERS.keys()


def test_every_field_of_a_plan_is_described() -> None:
    definitions = json.loads(schema_text("plan"))["$defs"]
    lacking = [name for name, field in definitions["Plan"]["properties"].items() if "description" not in field]
    assert lacking == ["schema"]


PLAN = json.loads(make_plan(warnings=(message_at("x"),)).to_json())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        (json.loads(make_plan(8, 2, world_size=2, tokens=make_token_budget()).to_json()), None),
        ({"kind": "guessed"}, "'guessed' is not one of ['measured', 'predicted']"),
        ({"target_batch": "256"}, "'256' is not of type 'integer'"),
        ({"schema": 4}, "3 was expected"),
        ({"trials": [{"parts": [1]}]}, "'outcome' is a required property"),
        ({"spec": {"precision": "fp8"}}, "'fp8' is not one of ['bf16', 'fp16', 'fp32']"),
        ({"warnings": ["a text"]}, "'a text' is not of type 'object'"),
    ],
)
def test_plans(change: dict[str, Any], told: str | None) -> None:
    assert faults("plan", PLAN | change) == ([told] if told else [])


def test_locks(tmp_path: Path) -> None:
    write_lock(tmp_path / "lock", a_lock(WHOLE, a_case(savers=["recompute"], coupled=False, overrides={"n": 1})))
    lines = [json.loads(line) for line in (tmp_path / "lock").read_text(encoding="utf-8").splitlines()]
    assert faults("lock", *lines) == []
    for line in ({"largest": "32"}, {"larges": 32}, {"largest": 32, "fits": True}, {"asked": {"gpu": "t4"}}, {}):
        assert len(faults("lock", line)) == 1


def test_settings() -> None:
    sound = {"gpu": "t4", "target-batch": 8, "plan": {"max-trials": 9}, "guard": {"cases": ["m.py --gpu t4"]}}
    assert faults("pyproject", sound) == []
    wrong: list[Any] = [{"gpus": "t4"}, {"precision": "bf16"}, {"gpu": 24}, {"target-batch": 0}, {"guad": {}}]
    assert len(faults("pyproject", *wrong, {"guard": {"cases": "m.py"}})) == len(wrong) + 1
