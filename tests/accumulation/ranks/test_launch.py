"""Ranks that this machine starts: their exit code, what is said of one that was killed, and waits that can be ended."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from command_line import environment
from warm_children import WarmPython

from autoaccum.accumulation.ranks.group import interruptibly

LAUNCH = """
import sys
from autoaccum.accumulation.ranks.launch import run_ranks
from autoaccum.errors import AutoaccumError

try:
    print(run_ranks(2, ["-c", sys.argv[1]]))
except AutoaccumError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize(
    ("on_second", "told"),
    [
        ("pass", "0"),
        ("sys.exit(2)", "2"),
        ("sys.exit(7)", "3 rank 1 of 2 left with exit status 7: look at its output"),
        ("os.kill(os.getpid(), 9)", "3 rank 1 of 2 was ended by SIGKILL: look at its output"),
    ],
)
def test_the_end_of_a_rank_is_that_of_all(on_second: str, told: str, tmp_path: Path, warm_python: WarmPython) -> None:
    code = f"import os, sys\nif os.environ['RANK'] == '1':\n    {on_second}"
    done = warm_python(tmp_path, "-c", LAUNCH, code, environment=environment())
    assert done.stdout.strip() == told, done.stderr


def test_a_signal_that_does_not_wake_the_main_thread_ends_its_wait() -> None:
    is_over, has_met = threading.Event(), threading.Event()

    def meet() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not is_over.wait(5):
            has_met.set()

    with pytest.raises(KeyboardInterrupt):
        interruptibly(meet)
    assert not has_met.is_set()
    is_over.set()
