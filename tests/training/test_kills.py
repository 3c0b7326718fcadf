"""Runs killed by SIGKILL at random moments and resumed end with the same weights; the benchmark has more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kills_lose_nothing_with_and_without_workers() -> None:
    options = ["--kills", "2", "--updates", "12", "--workers", "0", "2"]
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
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(": 0 ended otherwise than one never stopped" in line and int(line.split()[0]) >= 2 for line in lines)
