"""The contract of trials in place, in a process of its own: what other tests leave in this one is in its peaks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONTRACT = Path(__file__).with_name("in_place_contract.py")
ROOT = Path(__file__).parents[3]
CHECKS = CONTRACT.read_text(encoding="utf-8").count("\ndef test_")


def test_the_contract_holds_where_nothing_ran_before() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(CONTRACT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= CHECKS > 5
