"""Runs killed by SIGKILL at random moments and resumed end with the same weights; the benchmark has more of them."""

from __future__ import annotations

import pytest
from command_line import ROOT, environment
from warm_children import WarmPython


@pytest.mark.slow
def test_kills_lose_nothing_with_workers(warm_python: WarmPython) -> None:
    options = ["--kills", "2", "--updates", "12", "--workers", "2"]
    done = warm_python(ROOT, "tests/benchmarks/soak.py", *options, environment=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert ": 0 ended otherwise than one never stopped" in line
    assert int(line.split()[0]) >= 2
