"""The script runs whole on whatever device, and one probe's failure leaves the others alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoaccum.devices.process import PACKAGE_ROOT

PROBES = {"machine", "context", "growth", "workspace", "reductions", "attention", "embedding", "clipping"}
PROBES |= {"convolution", "trials", "plan"}


def measure(output: Path, device: str) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "tests.gpu.measure", "-o", str(output), "--device", device]
    subprocess.run(command, check=True, cwd=PACKAGE_ROOT, stdout=subprocess.DEVNULL, timeout=280)
    record: dict[str, dict[str, str]] = json.loads(output.read_text())
    return record


def test_every_probe_has_a_value(place: torch.device, tmp_path: Path) -> None:
    record = measure(tmp_path / "card.json", str(place))
    assert set(record) == PROBES
    assert {name: entry["error"] for name, entry in record.items() if "error" in entry} == {}


@pytest.mark.without_gpu
def test_a_probe_that_fails_leaves_its_error(tmp_path: Path) -> None:
    record = measure(tmp_path / "card.json", "cuda:0")
    assert set(record) == PROBES
    assert {name for name, entry in record.items() if "error" not in entry} == {"machine", "attention"}
