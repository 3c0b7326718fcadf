"""The examples, as `autoaccum verify` finds them. GPT-2 is left out: in float64 it takes minutes and gigabytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.api import verify

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["docstring_gpt", "two_losses", "digits_fit"])
def test_these_are_the_full_batchs(name: str) -> None:
    found = verify(EXAMPLES / f"{name}.py", target_batch=8)
    assert found.equivalent, found
    assert found.precision == "fp64"


def test_the_convolutional_one_has_batchnorm() -> None:
    found = verify(EXAMPLES / "digits_cnn.py", target_batch=8)
    assert not found.equivalent
    assert [(cause.kind, cause.where, cause.proved) for cause in found.causes] == [("batchnorm", ("2", "5"), True)]
    assert verify(EXAMPLES / "digits_cnn.py", target_batch=8, batchnorm="frozen").equivalent
