"""Children for tests that start many: copies of one process that has imported PyTorch, which takes 3 s of a processor.

A copy has the environment, folder, streams and parent that a started child has, and runs the same module. What a child
imports, and the limits on it, are then its own. Tests of the start itself, and of its environment, start real ones.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)
_MOST_BYTES = 200_000


class Nursery:
    """A process that copies itself on request; `measured` has the settings of malloc that a measured child has."""

    def __init__(self, environment: Mapping[str, str], *, measured: bool) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno()), "measured" if measured else "simulated"]
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
            self._process = subprocess.Popen(words, env=dict(environment), pass_fds=[theirs.fileno()], **how)

    def copy(self, words: Sequence[str], about: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Return the id of a copy that runs `python -m` with `words`; it is a child of this process."""
        request = json.dumps({"words": words, "parent": os.getpid(), **about}).encode()
        with self._lock:
            # The copy's parent in between ends at once, so that the kernel makes it a child of this process.
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._ours, [request], list(descriptors))
                return int(self._ours.recv(_MOST_BYTES))
            finally:
                _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        """End it; copies live on."""
        self._ours.close()
        self._process.wait()


class Copy:
    """A copy with what `ChildProcess` uses of `subprocess.Popen`."""

    def __init__(
        self, nursery: Nursery, words: Sequence[str], *, stdout: int, cwd: Path, env: Mapping[str, str], fd: int
    ) -> None:
        self.stdout: FileIO | None = None
        theirs = stdout
        if stdout == subprocess.PIPE:
            ours, theirs = os.pipe()
            self.stdout = FileIO(ours)
        module, connection, parent = words
        assert int(connection) == fd
        stderr = theirs if stdout == subprocess.PIPE else 2
        try:
            about = {"cwd": str(cwd), "environment": dict(env)}
            self.pid = nursery.copy([module, parent], about, [fd, theirs, stderr])
        finally:
            if stdout == subprocess.PIPE:
                os.close(theirs)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a copy", timeout)
            time.sleep(0.002)


@pytest.fixture(scope="session")
def nurseries() -> Iterator[dict[bool, Nursery]]:
    """Those of this test process, by whether their copies are measured; each is started when it is first needed."""
    known: dict[bool, Nursery] = {}
    yield known
    for nursery in known.values():
        nursery.close()


@pytest.fixture(scope="module")
def warm_children(nurseries: dict[bool, Nursery]) -> Iterator[None]:
    """Have every child that is started in this process be a copy."""
    from autoaccum.devices.child import process

    def start(command: Sequence[str], *, env: Mapping[str, str], **how: Any) -> Copy:
        measured = "MALLOC_ARENA_MAX" in env
        if measured not in nurseries:
            nurseries[measured] = Nursery(env, measured=measured)
        assert command[:2] == [sys.executable, "-m"]
        (descriptor,) = how["pass_fds"]
        return Copy(nurseries[measured], command[2:], stdout=how["stdout"], cwd=how["cwd"], env=env, fd=descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
        yield


def main(descriptor: int, kind: str) -> None:
    """Import what children of that kind need; then be copied until the other end is closed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    sys.path[0] = str(Path(__file__).parents[2])
    _import(kind)
    requests = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
        if not message:
            return
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                break
            os._exit(0)
        os.waitpid(between, 0)
        for number in descriptors:
            os.close(number)
    _become(requests, json.loads(message), descriptors)


def _import(kind: str) -> None:
    import torch

    from autoaccum.devices.trial_child import TrialChild

    TrialChild.prepare()
    if kind != "measured":
        for name in ("devices.simulated.simulated_child", "tuning.tuning_child", "tuning.trial_training"):
            import_module(f"autoaccum.{name}")
        from autoaccum.devices.simulated.cards import find_card
        from autoaccum.devices.simulated.tracing.simulation import simulate

        with simulate(find_card("t4")):  # As SimulatedChild.prepare, without its backward, which may start threads.
            torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    gc.collect()
    gc.freeze()


def _become(requests: socket.socket, about: dict[str, Any], descriptors: list[int]) -> None:
    """Be what was requested, once the copy between is gone."""
    module, parent = about["words"]
    while os.getppid() != int(parent):
        time.sleep(0.001)
    os.setsid()
    requests.send(str(os.getpid()).encode())
    requests.close()
    connection, *streams = descriptors
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["cwd"])
    sys.argv = [module, str(connection), parent]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
