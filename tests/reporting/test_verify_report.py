"""A verification on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from typing import Any

import pytest
from consoles import drawn, told

from autoaccum import Verification
from autoaccum.messages import message
from autoaccum.reporting.verify_report import VerificationProgress, verification_blocks
from autoaccum.verification.verification_result import (
    Cause,
    Compared,
    Comparison,
    Difference,
    Quantity,
    VerificationStarted,
)


def difference(quantity: Quantity, error: float, where: str | None, tolerance: float = 1e-10) -> Difference:
    return Difference(
        quantity=quantity,
        compared=0 if where is None else 4,
        error=error,
        where=where,
        tolerance=tolerance,
        equal=error <= tolerance,
    )


EQUAL = Comparison(
    method="accumulator",
    window="whole",
    micro_batches=(4, 4, 4, 4),
    differences=(
        difference("loss", 0.0, "loss"),
        difference("gradients", 1.5e-16, "2.weight"),
        difference("buffers", 0.0, None),
    ),
)
NOTE, MODE = message("samples_shortened", paths=["batch[1]"]), message("take_batchnorm_mode", mode="exact")
WRONG = message("wrong_weights", sizes=[3, 5], losses={"loss": [0.7, math.nan]}, divisor="samples")
FOUND = Verification(
    equivalent=True,
    target_batch=16,
    micro_batch=4,
    precision="fp64",
    device="cpu",
    batchnorm="micro",
    tolerance=1e-10,
    comparisons=(EQUAL,),
    causes=(),
    notes=(NOTE,),
    workload={"name": "small", "weight": "the samples", "sizes": (1, 2)},
    environment={"torch": "2.13.0", "variables": {}},
    seconds=1.25,
)
OTHER = Comparison(
    method="accumulate",
    window="last",
    micro_batches=(4, 3),
    differences=(
        difference("loss", 0.0, None),
        difference("gradients", 0.25, "2.weight"),
        difference("buffers", math.inf, "1.count", 0.0),
    ),
)
WEIGHT = Cause(
    kind="weight",
    found=WRONG,
    change=message("write_weight", code="(batch[1] != -100).sum()", is_sum=False),
    proved=True,
)
NORM = Cause(
    kind="batchnorm",
    found=message("batchnorm_by_parts", modules=["a", "b"]),
    change=MODE,
    where=("a", "b"),
    mode={"batchnorm": "exact"},
)
DIFFERENT = dataclasses.replace(FOUND, equivalent=False, comparisons=(EQUAL, OTHER), causes=(WEIGHT, NORM), notes=())


def draw(found: Verification, width: int = 100, *, verbose: bool = False) -> str:
    blocks = verification_blocks(found, again=["autoaccum", "verify", "my model.py"], verbose=verbose)
    return drawn(*blocks, width=width)


def test_equal_is_one_line() -> None:
    batch = "of the largest gradient entry (4 tensors, 16 samples as 4 + 4 + 4 + 4"
    said = f"equivalent: the accumulated update is the full batch's, to 1.5e-16 {batch}, float64)"
    assert draw(FOUND) == f"{said}; -v shows 1 note\n"
    assert draw(dataclasses.replace(FOUND, notes=())) == f"{said}\n"
    assert draw(FOUND, verbose=True).startswith(f"{said}\n\n")
    rough = draw(dataclasses.replace(FOUND, notes=(), precision="fp32"))
    assert rough.endswith(f"{batch}, float32, tolerance 1.0e-10)\n")


def test_all_that_was_compared_is_shown_where_it_is_requested() -> None:
    lines = draw(FOUND, verbose=True).splitlines()
    assert lines[2] == "the Accumulator, whole window: 4 + 4 + 4 + 4 = 16"
    assert lines[3].split() == ["compared", "largest", "error", "tolerance", "at"]
    assert lines[4].split() == ["loss", "4", "0", "1.0e-10"]
    assert lines[5].split() == ["gradients", "4", "1.5e-16", "1.0e-10", "2.weight"]
    assert f"note         {NOTE}" in lines


def test_what_differs_is_said_with_the_cause_and_code_to_copy() -> None:
    text = draw(DIFFERENT)
    lines = text.splitlines()
    assert lines[0] == "not equivalent: the gradients are off by 2.5e-01 of the largest gradient entry, at 2.weight"
    assert "tolerance" not in text
    shown = draw(DIFFERENT, verbose=True).splitlines()
    assert shown[: len(lines) - 3] == lines[:-3]
    assert "accumulate() of the workload, shorter window, as at the end of an epoch: 4 + 3 = 7" in shown
    assert next(line for line in shown if "1.count" in line).split() == [
        *("buffers", "4", "infinite", "exact", "1.count", "differs")
    ]
    assert f"cause 1      weight: {WRONG}"[:60] in text
    assert f"change       {str(WEIGHT.change).partition(' def ')[0]}" in lines
    assert "proved       with all of these done, the same comparison is equal" in lines
    assert f"change       {MODE}"[:60] in text
    assert any(line.startswith("unproved") for line in lines)
    alone = draw(dataclasses.replace(DIFFERENT, causes=(dataclasses.replace(NORM, proved=True),)))
    assert 'proved       with batchnorm="exact", the same comparison is equal' in alone.splitlines()
    narrow = draw(DIFFERENT, width=30).splitlines()
    assert "  def weight(batch): return (batch[1] != -100).sum()" in narrow, "code is never wrapped"


def test_a_notebook_shows_all_with_code_to_verify_again() -> None:
    assert repr(DIFFERENT).startswith("<Verification: not equivalent (weight, batchnorm), target_batch 16, micro_batch")
    shown = html.unescape(DIFFERENT._repr_html_() or "")
    assert 'autoaccum.verify(..., batchnorm="exact")' in shown
    assert "1.count" in shown
    assert " -v" not in shown


@pytest.mark.parametrize(
    ("changed", "last"),
    [
        ({}, "  autoaccum verify 'my model.py' --batchnorm exact"),
        (
            {"causes": (dataclasses.replace(NORM, mode={"batchnorm": "frozen"}),)},
            "  autoaccum verify 'my model.py' --batchnorm frozen",
        ),
        ({"causes": (WEIGHT,)}, "  autoaccum verify 'my model.py'"),
        ({"causes": ()}, "look at the tensors that differ (-v shows all that was compared)"),
        (
            {"causes": (), "comparisons": (EQUAL,), "untested": ("batch[2]",)},
            "could not shorten batch[2]: let batch(size) return short and long samples",
        ),
    ],
    ids=["exact", "frozen", "a change", "unknown", "untested"],
)
def test_the_last_line_is_what_to_do_next(changed: dict[str, Any], last: str) -> None:
    lines = draw(dataclasses.replace(DIFFERENT, **changed)).splitlines()
    assert lines[-1] == last
    assert ("untested" in changed) == lines[0].startswith("equal on 16 samples of equal length: ")


def test_json_begins_with_the_schema_and_has_no_infinity() -> None:
    record = json.loads(DIFFERENT.to_json())
    assert next(iter(record)) == "schema"
    buffers = record["comparisons"][1]["differences"][2]
    assert (buffers["error"], buffers["error_text"], buffers["tolerance"]) == (None, "infinite", 0.0)
    assert record["causes"][0]["found"]["facts"]["losses"] == {"loss": [0.7, None]}
    change = record["causes"][1]["change"]
    assert change == {"code": "take_batchnorm_mode", "facts": {"mode": "exact"}, "text": str(MODE)}


def test_progress_shows_what_is_verified() -> None:
    events = VerificationStarted("small", "Sequential", 1234, "fp64", "cpu"), Compared(EQUAL)
    text = "small: Sequential, 1,234 parameters; compared in fp64 on cpu\n"
    assert told(VerificationProgress, *events) == text
    assert told(VerificationProgress, *events, quiet=True) == ""
