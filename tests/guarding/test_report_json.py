"""A guard's report as JSON: complete, and the same from version to version."""

from __future__ import annotations

import dataclasses
import json

from guard_reports import ALL, REGRESSED, UNMEASURED, report

from autoaccum.guarding.judgements import Judgement, Report


def test_every_field_of_every_record_is_there() -> None:
    record = json.loads(ALL.to_json())
    assert list(record)[:2] == ["schema", "exit_code"]
    assert (record["schema"], record["exit_code"]) == (1, 1)
    assert {field.name for field in dataclasses.fields(Report)} <= record.keys()
    regressed = record["judgements"][-1]
    assert {field.name for field in dataclasses.fields(Judgement)} <= regressed.keys()
    assert regressed["name"] == "train.py on rtx3090, target 256, bf16"
    assert regressed["growth_bytes"] == 1280 * 2**20
    assert regressed["growths"][0] == {
        "category": "activations",
        "module": "blocks.*.mlp",
        "bytes": 1200 * 2**20,
        "change": "bf16 -> fp32",
    }
    assert regressed["before"]["micro_batches"] == [32] * 8
    assert (regressed["before"]["micro_batch"], regressed["now"]["spread_bytes"]) == (32, 0)
    assert record["tolerance"] == {"fraction": 0.01, "bytes": None}


def test_what_was_not_measured_is_null() -> None:
    (judgement,) = json.loads(report(UNMEASURED).to_json())["judgements"]
    assert (judgement["before"], judgement["now"], judgement["growth_bytes"]) == (None, None, None)


def test_the_text_ends_as_a_file_should() -> None:
    assert report(REGRESSED).to_json().endswith("}\n")
