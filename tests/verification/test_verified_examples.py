"""The examples, as `autoaccum verify` finds them. GPT-2 is left out: in float64 it takes minutes and gigabytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import environment
from warm_children import WarmPython

from autoaccum.api import verify

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "causes"),
    [
        ("two_losses.py", {}, []),
        ("contrastive.py", {}, []),
        ("digits_cnn.py", {}, ["batchnorm"]),
        ("digits_cnn.py", {"batchnorm": "exact"}, []),
        ("experts.py:usual", {}, ["coupled loss"]),  # Each micro-batch balances its experts.
    ],
)
def test_these_are_the_full_batchs_or_have_a_cause(name: str, options: dict[str, Any], causes: list[str]) -> None:
    found = verify(f"{EXAMPLES / name}", target_batch=8, **options)
    assert (found.equivalent, found.precision) == (not causes, "fp64")
    assert [cause.kind for cause in found.causes] == causes


@pytest.mark.slow
def test_the_modes_make_a_table(warm_python: WarmPython) -> None:
    done = warm_python(EXAMPLES.parent, "examples/batchnorm_modes.py", "12", "64", environment=environment())
    head, *rows = (line.split() for line in done.stdout.splitlines())
    assert head == ["micro-batch", "64"], done.stderr
    assert [row[0] for row in rows] == ["micro", "running", "exact", "GroupNorm"]
    assert all(float(share.rstrip("%")) > 60 for row in rows for share in row[1:]), rows
