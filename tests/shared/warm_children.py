"""Children for tests that start many: copies of one process that has imported PyTorch, which takes 3 s of a processor.

A copy has the environment, folder, streams and parent that a started child has, and runs the same module. What a child
imports, and the limits on it, are then its own. Tests of the start itself, and of its environment, start real ones.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

_PR_SET_CHILD_SUBREAPER = 36
WarmPython = Callable[..., "subprocess.CompletedProcess[str]"]
WarmRanks = Callable[..., "list[subprocess.CompletedProcess[str]]"]
_LIBC = ctypes.CDLL(None)
_MOST_BYTES = 200_000
_PASSED = "@"


class Nursery:
    """A process that copies itself on request; `measured` has the settings of malloc that a measured child has.

    Its copies have imported the modules `imports`; a simulation's child does that with a card, which is simulated.
    Without an environment it is a fork of this process, which must not have threads.
    """

    def __init__(self, environment: Mapping[str, str] | None, *, measured: bool, imports: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if environment is None:
                self.pid = os.fork()
                if self.pid == 0:
                    self._ours.close()
                    os.setsid()
                    _serve(theirs, measured=measured)
                    os._exit(0)
                return
            words = [sys.executable, __file__, str(theirs.fileno()), "measured" if measured else "simulated", *imports]
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
            self._process = subprocess.Popen(words, env=dict(environment), pass_fds=[theirs.fileno()], **how)
        self.pid = self._process.pid

    def copy(self, words: Sequence[str], about: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Return the id of a copy that runs `python` with `words`; it is a child of this process.

        Its stdout and stderr are the first two `descriptors`; the word `_PASSED` is the number of the third.
        """
        request = json.dumps({"words": list(words), "parent": os.getpid(), **about}).encode()
        with self._lock:
            # The copy's parent in between ends at once, so that the kernel makes it a child of this process.
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # The next answer is the next copy's.
            try:
                socket.send_fds(self._ours, [request], list(descriptors))
                return int(self._ours.recv(_MOST_BYTES))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        """End it; copies live on."""
        self._ours.close()
        self._process.wait()


class Copy:
    """A copy with what `ChildProcess` uses of `subprocess.Popen`."""

    def __init__(
        self, nursery: Nursery, words: Sequence[str], *, stdout: int, cwd: Path, env: Mapping[str, str], **how: Any
    ) -> None:
        (passed,) = how["pass_fds"]
        words = [_PASSED if word == str(passed) else word for word in words]
        ours, theirs = os.pipe() if stdout == subprocess.PIPE else (None, os.dup(stdout))
        self.stdout = None if ours is None else FileIO(ours)
        try:
            self.pid = nursery.copy(words, {"cwd": str(cwd), "environment": dict(env)}, [theirs, theirs, passed])
        finally:
            os.close(theirs)

    def wait(self, timeout: float) -> None:
        wait(self.pid, timeout)


def wait(pid: int, timeout: float) -> int:
    """Return the exit code of a copy."""
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("a copy", timeout)
        time.sleep(0.002)


class Nurseries(dict[bool, Nursery]):
    """By whether their copies are measured; each is started when it is first needed."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        from autoaccum.devices.child.process import child_environment

        super().__init__()
        self._imports = imports
        self._environments = {measured: child_environment(measured=measured) for measured in (False, True)}

    def __missing__(self, measured: bool) -> Nursery:
        self[measured] = Nursery(self._environments[measured], measured=measured, imports=self._imports)
        return self[measured]


@pytest.fixture(scope="session")
def nurseries() -> Iterator[Nurseries]:
    """Those of this test process, in the environment that it had before any test changed it."""
    known = Nurseries()
    yield known
    for nursery in known.values():
        nursery.close()


@contextmanager
def warmed(nurseries: Mapping[bool, Nursery]) -> Iterator[None]:
    """Have every child that is started in this process be a copy, if there is a nursery for its kind."""
    from autoaccum.devices.child import process

    def start(command: Sequence[str], **how: Any) -> Any:
        measured = "MALLOC_ARENA_MAX" in how["env"]
        if not isinstance(nurseries, Nurseries) and measured not in nurseries:
            return subprocess.Popen(command, **how)
        return Copy(nurseries[measured], command[1:], **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start_process", start)
        yield


@pytest.fixture(scope="module")
def warm_children(nurseries: Nurseries) -> Iterator[None]:
    """Have every child that tests of the module start be a copy."""
    with warmed(nurseries):
        yield


@pytest.fixture(scope="module")
def warm_python(nurseries: Nurseries) -> WarmPython:
    """Run a script or code in a copy: called with a folder, what follows `python`, and the whole environment.

    If `measured`, it has the settings of malloc of a measured child: what is freed is given back.
    """

    def run(
        folder: Path, *words: str, environment: Mapping[str, str], measured: bool = False
    ) -> subprocess.CompletedProcess[str]:
        about = {"cwd": str(folder), "environment": dict(environment)}
        with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
            code = wait(nurseries[measured].copy(words, about, [stdout.fileno(), stderr.fileno()]), 240)
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(words, code, stdout.read(), stderr.read())

    return run


@pytest.fixture(scope="module")
def warm_ranks(warm_python: WarmPython, nurseries: Nurseries) -> WarmRanks:
    """Run what `warm_python` runs as two ranks at once, each with the variables that torchrun sets."""

    def run(
        folder: Path, *words: str, environment: Mapping[str, str], measured: bool = False
    ) -> list[subprocess.CompletedProcess[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}

        def run_rank(rank: str) -> subprocess.CompletedProcess[str]:
            own = {"RANK": rank, "LOCAL_RANK": rank}
            return warm_python(folder, *words, environment={**environment, **meeting, **own}, measured=measured)

        nurseries[measured]  # One for both, before there are threads.
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run_rank, "01"))

    return run


def main(descriptor: int, kind: str, imports: Sequence[str]) -> None:
    """Import what children of that kind need; then be copied until the other end is closed, as by the tests' end."""
    sys.path[0] = str(Path(__file__).parents[2])
    _import(kind, imports)
    sys.stdout.flush()  # What imports print is not the copies': Ultralytics does where it has no settings yet.
    _serve(socket.socket(fileno=descriptor), measured=kind == "measured")


def _serve(requests: socket.socket, *, measured: bool) -> None:
    """Be copied until the other end is closed."""
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
    _become(requests, json.loads(message), descriptors, measured=measured)


def _import(kind: str, imports: Sequence[str]) -> None:
    import torch

    from autoaccum.devices.trial_child import TrialChild

    TrialChild.prepare()
    with ExitStack() as stack:
        if kind != "measured":
            for name in ("devices.simulated.simulated_child", "tuning.trial_training"):
                import_module(f"autoaccum.{name}")
            from autoaccum.simulation.cards import find_card
            from autoaccum.simulation.tracing.simulation import simulate

            stack.enter_context(simulate(find_card("t4")))  # As SimulatedChild.prepare, without threads of backward.
            torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        for name in imports:
            import_module(name)
    gc.collect()
    gc.freeze()


def _become(requests: socket.socket, about: dict[str, Any], descriptors: list[int], *, measured: bool) -> None:
    """Be what was requested, once the copy between is gone."""
    deadline = time.monotonic() + 30
    while os.getppid() != about["parent"]:
        if time.monotonic() > deadline:  # Whoever asked was interrupted or killed.
            os._exit(1)
        time.sleep(0.001)
    os.setsid()
    requests.send(str(os.getpid()).encode())
    requests.close()
    stdout, stderr, *passed = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    # What the first process wrote to may have been no terminal, or one.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["cwd"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    first, *rest = (str(passed[0]) if word == _PASSED else word for word in about["words"])
    code: Any = 0
    try:
        if rest[:1] == ["autoaccum.devices.child"]:
            _run(first, rest)
        else:  # Its own children are copies, too.
            own = Nursery(None, measured=measured)
            with warmed({True: own, False: own} if measured else {False: own}):
                _run(first, rest)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    # As Python ends, but for taking down every module, which takes half a second of a processor.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(first: str, rest: list[str]) -> None:
    """Run a module, code or a script with its words."""
    if first == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # As in a fresh process; it would run twice.
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
