"""Runs killed by SIGKILL at random moments end, resumed, with the same weights: a dozen of those in the benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dozen_kills_lose_nothing(workers: int) -> None:
    kills = 12 if workers == 0 else 3
    done = subprocess.run(
        [sys.executable, "tests/benchmarks/soak.py", "--kills", str(kills), "--workers", str(workers)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 ended otherwise than one never stopped" in done.stdout
    assert int(done.stdout.split()[0]) >= kills
