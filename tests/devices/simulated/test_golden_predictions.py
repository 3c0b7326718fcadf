"""Predictions of 40 workloads and cards are, to the byte, those that were recorded (`golden/record.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
RECORDED = GOLDEN / f"torch-{torch.__version__}.json"
REFERENCE = "2.13.0"
"""The torch whose predictions are always compared."""
EXPECTED: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


@pytest.fixture(scope="module")
def predicted() -> dict[str, Any]:
    """All of them by one fresh process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(GOLDEN / "record.py")]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert made.returncode == 0, made.stderr
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def test_this_torch_is_recorded() -> None:
    if not EXPECTED and not torch.__version__.startswith(REFERENCE):
        pytest.skip(f"no predictions are recorded for torch {torch.__version__}, which has other kernels")
    assert len(EXPECTED) == 40, f"{RECORDED} is to be written by golden/record.py --write"


@pytest.mark.parametrize("pair", EXPECTED)
def test_a_prediction_is_the_recorded_one(pair: str, predicted: dict[str, Any]) -> None:
    assert predicted[pair] == EXPECTED[pair]
