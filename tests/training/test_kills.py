"""Runs killed by SIGKILL at random moments and resumed end with the same weights; the benchmark has more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kills_lose_nothing_with_workers() -> None:
    options = ["--kills", "2", "--updates", "12", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "tests/benchmarks/soak.py", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert ": 0 ended otherwise than one never stopped" in line
    assert int(line.split()[0]) >= 2
