"""Ctrl-C while two cases are measured side by side: every process ends soon, and nothing is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

GUARD = """
import os
os.sched_getaffinity = lambda pid: {0, 1}
from pathlib import Path
from autoaccum.guarding.guarding import guard
from autoaccum.guarding.asked.project import Project
from autoaccum.guarding.records import Case
from autoaccum.guarding.asked.selection import Selection

here = Path.cwd()
cases = tuple(Case(workload="hangs.py", gpu=gpu, target_batch=8) for gpu in ("rtx3090", "t4", "v100"))
project = Project(folder=here, lock=here / "autoaccum.lock", cases=cases)
guard(Selection(), project, update=True, on_output=lambda line: print(line, flush=True))
"""


def children_of(pid: int) -> list[str]:
    """The children that measure for a process, by what they were started with."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"autoaccum.devices.child" in words and words[-2] == str(pid).encode():
            found.append(folder.name)
    return found


def test_ctrl_c_ends_all_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\nprint('loading')\ntime.sleep(600)\n")
    guarding = subprocess.Popen(
        [sys.executable, "-c", GUARD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert guarding.stdout is not None
        assert [guarding.stdout.readline() for _ in range(2)] == ["loading\n"] * 2
        assert len(children_of(guarding.pid)) == 2
        guarding.send_signal(signal.SIGINT)
        _, said = guarding.communicate(timeout=60)
    finally:
        guarding.kill()
    assert "KeyboardInterrupt" in said
    for _ in range(100):
        if not children_of(guarding.pid):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a child lives on")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["hangs.py"]
