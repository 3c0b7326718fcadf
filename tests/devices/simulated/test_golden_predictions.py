"""Predictions of 26 workloads and cards are, to the byte, those that were recorded (`golden/record.py`).

Another release of torch may have other kernels: there, a quick group is near that of the nearest recorded release.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_children import WarmPython

GOLDEN = Path(__file__).parent / "golden"
NEAR = 0.03
"""The share by which allocated bytes may differ from those of another release. Reserved bytes, in steps of 20 MiB, and
what fits within a limit may differ by more."""


def nearest(version: str, recorded: Iterable[str]) -> str:
    """Return the recorded version next to `version`; of two that are as near, the newer."""

    def distance(other: str) -> tuple[bool, int, int]:
        here, there = (
            100 * int(major) + int(minor) for major, minor in (one.split(".")[:2] for one in (version, other))
        )
        return other != version, abs(there - here), -there

    return min(recorded, key=distance)


REFERENCE = nearest(torch.__version__, [path.stem.removeprefix("torch-") for path in GOLDEN.glob("torch-*.json")])
IS_RECORDED = torch.__version__ == REFERENCE
EXPECTED: dict[str, Any] = json.loads((GOLDEN / f"torch-{REFERENCE}.json").read_text())

WORKLOADS = {pair.partition(" on ")[0] for pair in EXPECTED}
QUICK = {"lstm_fp32", "mlp_held", "mlp_one_by_one", "mlp_sgd", "penalised", "tables_sparse"}
LANGUAGE = {name for name in WORKLOADS if name.startswith(("gpt", "llama", "masked", "encoder"))}
GROUPS = {"quick": QUICK}
if IS_RECORDED and torch.version.cuda is not None:  # On the CPU's build, `record.py --check` compares all.
    GROUPS |= {"language": LANGUAGE, "others": WORKLOADS - QUICK - LANGUAGE}


def test_this_torch_is_recorded() -> None:
    assert len(EXPECTED) == 26
    if not IS_RECORDED:
        seen = f"no predictions are recorded for torch {torch.__version__}"
        pytest.skip(f"{seen}: those of the quick group are compared with {REFERENCE}'s, within {NEAR:.0%}")


@pytest.mark.parametrize("group", GROUPS)
def test_predictions_are_the_recorded_ones(group: str, warm_python: WarmPython) -> None:
    workloads = GROUPS[group]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    made = warm_python(GOLDEN, "record.py", *workloads, environment=environment)
    assert made.returncode == 0, made.stderr
    predicted: dict[str, Any] = json.loads(made.stdout)
    expected = {pair: found for pair, found in EXPECTED.items() if pair.partition(" on ")[0] in workloads}
    if IS_RECORDED:
        assert predicted == {pair: found | expected[pair] for pair, found in predicted.items()}
    else:
        bytes_here, bytes_there = (
            {pair: found["peak_allocated_bytes"] for pair, found in predictions.items()}
            for predictions in (predicted, expected)
        )
        assert bytes_here == pytest.approx(bytes_there, rel=NEAR)
