"""Predictions of 26 workloads and cards are, to the byte, those that were recorded (`golden/record.py`)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_children import WarmPython

GOLDEN = Path(__file__).parent / "golden"
RECORDED = GOLDEN / f"torch-{torch.__version__}.json"
REFERENCE = "2.13.0"
"""The torch whose predictions are always compared."""
EXPECTED: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


WORKLOADS = {pair.partition(" on ")[0] for pair in EXPECTED}
QUICK = {"lstm_fp32", "mlp_held", "mlp_one_by_one", "mlp_sgd", "penalised", "tables_sparse"}
LANGUAGE = {name for name in WORKLOADS if name.startswith(("gpt", "llama", "masked", "encoder"))}
GROUPS = {"quick": QUICK}
if torch.version.cuda is not None:  # .ci/run has both builds; on the CPU's, `record.py --check` compares all.
    GROUPS |= {"language": LANGUAGE, "others": WORKLOADS - QUICK - LANGUAGE}


def test_this_torch_is_recorded() -> None:
    if not EXPECTED and not torch.__version__.startswith(REFERENCE):
        pytest.skip(f"no predictions are recorded for torch {torch.__version__}, which has other kernels")
    assert len(EXPECTED) == 26, f"{RECORDED} is to be written by golden/record.py --write"


@pytest.mark.parametrize("group", GROUPS)
def test_predictions_are_the_recorded_ones(group: str, warm_python: WarmPython) -> None:
    workloads = GROUPS[group]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    made = warm_python(GOLDEN, "record.py", *workloads, environment=environment)
    assert made.returncode == 0, made.stderr
    predicted: dict[str, Any] = json.loads(made.stdout)
    assert predicted == {pair: found for pair, found in EXPECTED.items() if pair.partition(" on ")[0] in workloads}
