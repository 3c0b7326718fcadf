"""The examples, as `autoaccum verify` finds them. GPT-2 is left out: in float64 it takes minutes and gigabytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import environment
from warm_children import WarmPython

from autoaccum.api import verify

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_losses", "contrastive"])
def test_these_are_the_full_batchs(name: str) -> None:
    found = verify(EXAMPLES / f"{name}.py", target_batch=8)
    assert found.equivalent, found
    assert found.precision == "fp64"


@pytest.mark.slow
def test_the_convolutional_one_has_batchnorm() -> None:
    found = verify(EXAMPLES / "digits_cnn.py", target_batch=8)
    assert not found.equivalent
    assert [(cause.kind, cause.where, cause.proved) for cause in found.causes] == [("batchnorm", ("2", "5"), True)]
    assert verify(EXAMPLES / "digits_cnn.py", target_batch=8, batchnorm="exact").equivalent


@pytest.mark.slow
def test_experts_that_each_micro_batch_balances_are_not() -> None:
    (cause,) = verify(f"{EXAMPLES / 'experts.py'}:usual", target_batch=8).causes
    assert cause.kind == "coupled loss"


@pytest.mark.slow
def test_the_modes_make_a_table(warm_python: WarmPython) -> None:
    done = warm_python(EXAMPLES.parent, "examples/batchnorm_modes.py", "12", "64", environment=environment())
    head, *rows = (line.split() for line in done.stdout.splitlines())
    assert head == ["micro-batch", "64"], done.stderr
    assert [row[0] for row in rows] == ["micro", "running", "exact", "GroupNorm"]
    assert all(float(share.rstrip("%")) > 60 for row in rows for share in row[1:]), rows
