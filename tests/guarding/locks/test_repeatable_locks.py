"""One commit has one lock, whoever writes it, where, and with how many threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autoaccum.devices.process import PACKAGE_ROOT

TIMES = 20
SETTINGS = """
[[tool.autoaccum.guard]]
workload = "docstring_gpt.py"
gpu = "8GiB"
target-batch = 4096
"""


def lock_in(folder: Path, number: int) -> bytes:
    """The lock that `autoaccum guard --update` writes in a folder of its own, from below it, in other surroundings."""
    below = folder / "below"
    below.mkdir(parents=True)
    shutil.copy(PACKAGE_ROOT / "examples" / "docstring_gpt.py", folder)
    (folder / "pyproject.toml").write_text(SETTINGS)
    surroundings = {
        "PYTHONPATH": str(PACKAGE_ROOT),
        "OMP_NUM_THREADS": str(1 + number % 4),
        "PYTHONHASHSEED": str(number),
        "TZ": f"UTC{number - TIMES // 2:+}",
        "LC_ALL": "C" if number % 2 else "C.UTF-8",
    }
    done = subprocess.run(
        [sys.executable, "-m", "autoaccum", "guard", "--update", "-q"],
        cwd=below if number % 2 else folder,
        env=os.environ | surroundings,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "autoaccum.lock").read_bytes()


@pytest.mark.timeout(900)
def test_twenty_locks_are_equal_to_the_byte(tmp_path: Path) -> None:
    folders = [tmp_path / ("x" * number) / f"clone {number}" for number in range(1, TIMES + 1)]
    with ThreadPoolExecutor(2) as pool:
        locks = set(pool.map(lock_in, folders, range(1, TIMES + 1)))
    assert len(locks) == 1
    assert b'["docstring_gpt.py on 8GiB, target 4096"]' in locks.pop()
