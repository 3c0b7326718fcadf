"""Semaphores of a workload, as a pool of processes has them, are gone with its child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from command_line import environment

CHILD = """
import os
from multiprocessing import Pipe, get_context

from autoaccum.devices.child.requests import ParentConnection

ours, theirs = Pipe()
ParentConnection([str(os.dup(theirs.fileno())), str(os.getppid())])
lock = get_context("spawn").Lock()
print(lock._semlock.name)
"""


def test_a_child_that_leaves_removes_them() -> None:
    """Its group is killed right after it, and the process that would remove them with it."""
    words = [sys.executable, "-c", CHILD]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment()
    ) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        name, errors = child.communicate()
    assert (errors, child.returncode) == ("", 0)
    assert name.startswith("/mp-")
    assert not Path(f"/dev/shm/sem.{name[1:].strip()}").exists()
