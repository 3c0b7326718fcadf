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

from autoaccum.units import MIB

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


def recorded(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"torch-{version}.json").read_text())
    return found


REFERENCE = nearest(torch.__version__, [path.stem.removeprefix("torch-") for path in GOLDEN.glob("torch-*.json")])
IS_RECORDED = torch.__version__ == REFERENCE
EXPECTED = recorded(REFERENCE)

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


def test_recorded_releases_differ_by_what_their_rules_say() -> None:
    """Up to 2.11, cuBLASLt has a workspace of its own in each thread that adds a bias to a product.

    2.14 is as 2.13, except for convolutions, about which a build for the CPU has no cuDNN to ask.
    """
    old, new, on_cpu = (recorded(version) for version in ("2.11.0+cu130", "2.14.1+cu130", "2.13.0+cpu"))
    workspaces = {
        pair.partition(" on ")[0]: old[pair]["categories"]["workspace"] - found["categories"]["workspace"]
        for pair, found in new.items()
        if "categories" in found
    }
    without_bias = ("llama_bf16", "lstm_fp32", "gru_bf16", "speech_fp32", "unet_fp16")
    both_threads = ("gpt_checkpointed",)
    expected = dict.fromkeys(WORKLOADS, MIB) | dict.fromkeys(without_bias, 0) | dict.fromkeys(both_threads, 2 * MIB)
    assert workspaces == expected
    differ = {pair.partition(" on ")[0] for pair in new if new[pair] != on_cpu[pair]}
    assert differ == {"resnet_fp32", "resnet_bf16_last", "speech_fp32", "unet_fp16"}


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
