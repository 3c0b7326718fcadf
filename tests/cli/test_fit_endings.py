"""A `fit` ends when it is told to, also while it waits for other ranks."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import environment, wait_for
from warm_children import Nurseries, wait

MODEL = """
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
WORDS = ["fit", "model.py", "--target-batch", "8", "--micro-batch", "4", "--steps", "1", "--run-dir", "run"]
StartRank = Callable[[int, int], int]


@pytest.fixture
def start_rank(folder: Path, nurseries: Nurseries) -> Iterator[StartRank]:
    """Start a rank of two, which prints to a file of its number; what still runs at the end is killed."""
    started: list[int] = []

    def start(number: int, port: int) -> int:
        ranks = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        about = {"cwd": str(folder), "environment": environment(**ranks)}
        with (folder / str(number)).open("w") as told:
            streams = [told.fileno(), told.fileno()]
            started.append(nurseries[False].copy(["-m", "autoaccum", *WORDS], about, streams))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:  # It may have been given the very port that it connects to.
        return probe.connect_ex(("127.0.0.1", port)) == 0 and probe.getsockname() != probe.getpeername()


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_never_comes_can_be_stopped(folder: Path, start_rank: StartRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        second = start_rank(1, port)
        server.settimeout(120)
        with server.accept()[0]:  # It has met nobody.
            os.kill(second, signal.SIGTERM)
            assert wait(second, 30) == 143
    first = start_rank(0, port)
    deadline = time.monotonic() + 60
    while not is_listening(port):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(first, signal.SIGINT)
    assert wait(first, 30) == 130
    assert (folder / "0").read_text() == "interrupted before training began\n"
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_rank_that_waits_for_what_another_does_can_be_stopped(folder: Path, start_rank: StartRank) -> None:
    (folder / "model.py").write_text(MODEL.replace("pass  # SLEEP", RANK_0_SLEEPS))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _, second = (start_rank(number, port) for number in (0, 1))
    wait_for(folder / "started1")
    time.sleep(2)
    assert os.waitpid(second, os.WNOHANG) == (0, 0), "it waits"
    os.kill(second, signal.SIGTERM)
    assert wait(second, 30) == 143
