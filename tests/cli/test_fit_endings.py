"""A `fit` ends when it is told to, also while it waits for other ranks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from command_line import environment, wait_for

WORKLOAD = """
import os, pathlib, threading, time, torch
from torch import nn

x = torch.randn(16, 3)
dataset = torch.utils.data.TensorDataset(x, x)
criterion = nn.MSELoss()

def model():
    pathlib.Path("started" + os.environ.get("RANK", "")).touch()
    pass  # SLEEP
    return nn.Linear(3, 3)
"""
RANK_0_SLEEPS = 'time.sleep(600 * (os.environ["RANK"] == "0"))'
WORDS = ["fit", "m.py", "--target-batch", "8", "--micro-batch", "4", "--steps", "1", "--run-dir", "run"]


@contextmanager
def rank_of_two(number: int, folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    about = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-m", "autoaccum", *WORDS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=folder, env=environment(**about), text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:  # It may have been given the very port that it connects to.
        return probe.connect_ex(("127.0.0.1", port)) == 0 and probe.getsockname() != probe.getpeername()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_never_comes_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(WORKLOAD)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with rank_of_two(1, tmp_path, server.getsockname()[1]) as second:
            server.settimeout(120)
            with server.accept()[0]:  # It has met nobody.
                second.send_signal(signal.SIGTERM)
                assert second.wait(30) == 143
        port = server.getsockname()[1]
    with rank_of_two(0, tmp_path, port) as first:
        while first.poll() is None and not is_listening(port):
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        assert first.communicate(timeout=30) == ("", "interrupted before training began\n")
        assert first.returncode == 130
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_that_waits_for_what_another_does_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(WORKLOAD.replace("pass  # SLEEP", RANK_0_SLEEPS))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        _, second = (stack.enter_context(rank_of_two(number, tmp_path, port)) for number in (0, 1))
        wait_for(tmp_path / "started1")
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(2)
        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 143
