"""A worker ends with its main process, however that ends and whenever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import multiprocessing

from autoaccum.training.data.worker_start import WorkerStart

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, signal, sys, time
from autoaccum.training.data.worker_start import WorkerStart

main = os.fork()
if main == 0:
    start, own = WorkerStart(None), os.getpid()
    worker = os.fork()
    if worker == 0:
        if sys.argv[1] == "late":  # killed before its worker has begun to look
            while os.getppid() == own:
                time.sleep(0.01)
        start(0)
        os.write(1, b"ready\\n")
        time.sleep(600)
    time.sleep(600)
time.sleep(1)
os.kill(main, signal.SIGKILL)
os.waitpid(main, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize(("when", "told"), [("early", "ready\n"), ("late", "")])
def test_a_worker_whose_main_process_is_killed_ends(when: str, told: str) -> None:
    """Its output ends only when no process holds it any more."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, told), done.stderr


def test_under_a_fork_server_the_parent_is_another() -> None:
    assert WorkerStart(None, "forkserver")._parent is None
    assert WorkerStart(None, multiprocessing.get_context("forkserver"))._parent is None
    assert WorkerStart(None, "spawn")._parent == os.getpid()
