"""Children for tests that start many: copies of one process that has imported PyTorch, which takes 3 s of a processor.

A copy has the environment, folder, streams and parent that a started child has, and runs the same module. What a child
imports, and the limits on it, are then its own. Tests of the start itself, and of its environment, start real ones.
The script of a command is a copy, too, unless its memory is measured: there the watch begins before the script's first
line, and not where it imports PyTorch.
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
from contextlib import ExitStack, contextmanager
from importlib import import_module
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import pytest

_PR_SET_CHILD_SUBREAPER = 36
Completed = subprocess.CompletedProcess[str]
WarmPython = Callable[..., Completed]
WarmRanks = Callable[..., list[Completed]]
_LIBC = ctypes.CDLL(None)
_MOST_BYTES = 200_000
_PASSED = "@"


class Nursery:
    """A process that copies itself on request, reached by the socket `ours`."""

    def __init__(self, ours: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._lock, self._ours, self._process = threading.Lock(), ours, process
        self.pid = 0 if process is None else process.pid

    @classmethod
    def start(cls, environment: Mapping[str, str], kind: str, imports: Sequence[str]) -> Nursery:
        """Start one in an environment; its copies have imported what children of that kind need, and `imports`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno()), kind, *imports]
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
            return cls(ours, subprocess.Popen(words, env=dict(environment), pass_fds=[theirs.fileno()], **how))

    @classmethod
    def fork(cls) -> Nursery:
        """Return a copy of this process, which must not have threads, as a nursery."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if os.fork() == 0:
                ours.close()
                os.setsid()
                _serve(theirs)
                os._exit(0)
        return cls(ours)

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
        if self._process is not None:
            self._process.wait()


class Copy:
    """A copy with what `ChildProcess` and `Supervisor` use of `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, nursery: Nursery, command: Sequence[str], **how: Any) -> None:
        passed = how.get("pass_fds", ())
        words = [_PASSED if word in map(str, passed) else word for word in command[1:]]
        ours, theirs = os.pipe() if how["stdout"] == subprocess.PIPE else (None, os.dup(how["stdout"]))
        self.stdout = None if ours is None else FileIO(ours)
        try:
            about = {"cwd": str(how["cwd"]), "environment": dict(how["env"])}
            self.pid = nursery.copy(words, about, [theirs, theirs, *passed])
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        self.returncode = wait(self.pid, timeout)


class ScriptCopy(Copy):
    """A copy of this process, which supervises a command."""

    def __init__(self, words: Sequence[str], how: Mapping[str, Any]) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        stdout = how["stdout"].fileno()
        os.dup2(stdout, 3)
        os.closerange(4, 256)
        _become(words[1:], how["env"], how["cwd"], 3, os.dup(3))


def start_command(words: Sequence[str], **how: Any) -> Any:
    """Start a command: as a copy if it runs a script, on a simulated card or to compare gradients."""
    from autoaccum.devices.command.settings import read_settings

    settings = read_settings(how["env"]["AUTOACCUM_COMMAND"])
    is_script = words[0] in ("python", sys.executable) and "torch.distributed.run" not in words
    if is_script and (settings.card is not None or settings.compares):
        return ScriptCopy(words, how)
    return subprocess.Popen(words, **how)


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
    """By whether their copies are measured children, in the environment of now; each is started when first needed."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        from autoaccum.devices.child.process import child_environment

        super().__init__()
        self._imports = imports
        self._environments = {measured: child_environment(measured=measured) for measured in (False, True)}

    def __missing__(self, measured: bool) -> Nursery:
        kind = "measured" if measured else "simulated"
        self[measured] = Nursery.start(self._environments[measured], kind, self._imports)
        return self[measured]

    @contextmanager
    def running(self) -> Iterator[Nurseries]:
        """End them afterwards."""
        yield self
        for nursery in self.values():
            nursery.close()


@pytest.fixture(scope="session")
def nurseries() -> Iterator[Nurseries]:
    """Those of this test process, in the environment that it had before any test changed it."""
    with Nurseries().running() as nurseries:
        yield nurseries


@contextmanager
def warmed(nursery_of: Callable[[bool], Nursery | None]) -> Iterator[None]:
    """Have every child that is started in this process be a copy, if there is a nursery for its kind."""
    from autoaccum.devices.child import process

    def start(command: Sequence[str], **how: Any) -> Any:
        nursery = nursery_of("MALLOC_ARENA_MAX" in how["env"])
        return subprocess.Popen(command, **how) if nursery is None else Copy(nursery, command, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "start_process", start)
        yield


@pytest.fixture(scope="module")
def warm_children(nurseries: Nurseries) -> Iterator[None]:
    """Have every child that tests of the module start be a copy."""
    with warmed(nurseries.__getitem__):
        yield


@pytest.fixture(scope="module")
def warm_python(warm_ranks: WarmRanks) -> WarmPython:
    """Run a script or code in a copy: called with a folder, what follows `python`, and the whole environment.

    If `measured`, it has the settings of malloc of a measured child: what is freed is given back.
    """
    return lambda *words, **how: warm_ranks(*words, ranks=1, **how)[0]


@pytest.fixture(scope="module")
def warm_ranks(nurseries: Nurseries) -> WarmRanks:
    """Run what `warm_python` runs as two ranks at once, each with the variables that torchrun sets."""

    def run(
        folder: Path, *words: str, environment: Mapping[str, str], measured: bool = False, ranks: int = 2
    ) -> list[Completed]:
        with ExitStack() as stack:
            free = stack.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
            free.close()
            copies = []
            for rank in map(str, range(ranks)):
                of_rank = {**meeting, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
                about = {"cwd": str(folder), "environment": {**environment, **of_rank}}
                streams = [stack.enter_context(TemporaryFile("w+")) for _ in range(2)]
                pid = nurseries[measured].copy(words, about, [stream.fileno() for stream in streams])
                copies.append((pid, streams))
            codes = [wait(pid, 240) for pid, _ in copies]
            for stream in (stream for _, streams in copies for stream in streams):
                stream.seek(0)
            pairs = zip(codes, copies, strict=True)
            return [Completed(words, code, *(stream.read() for stream in streams)) for code, (_, streams) in pairs]

    return run


def main(descriptor: int, kind: str, imports: Sequence[str]) -> None:
    """Import what children of that kind need; then be copied until the other end is closed, as by the tests' end."""
    sys.path[0] = str(Path(__file__).parents[2])
    import torch

    from autoaccum.devices.trial_child import TrialChild

    TrialChild.prepare()
    with ExitStack() as stack:
        if kind == "simulated":
            watches = ("devices.command.on_card", "devices.command.gradient_watch", "devices.command.watch")
            for name in ("devices.simulated.simulated_child", "tuning.trial_training", *watches):
                import_module(f"autoaccum.{name}")
            from autoaccum.simulation.cards import find_card
            from autoaccum.simulation.tracing.simulation import simulate

            stack.enter_context(simulate(find_card("t4")))  # As SimulatedChild.prepare, without threads of backward.
            torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        for name in imports:
            import_module(name)
    gc.collect()
    gc.freeze()
    sys.stdout.flush()  # What imports print is not the copies': Ultralytics does where it has no settings yet.
    _serve(socket.socket(fileno=descriptor))


def _serve(requests: socket.socket) -> None:
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
    about = json.loads(message)
    deadline = time.monotonic() + 30
    while os.getppid() != about["parent"]:  # Once the copy between is gone.
        if time.monotonic() > deadline:  # Whoever asked was interrupted or killed.
            os._exit(1)
        time.sleep(0.001)
    os.setsid()
    requests.send(str(os.getpid()).encode())
    requests.close()
    _become(about["words"], about["environment"], about["cwd"], *descriptors)


def _become(
    words: Sequence[str], environment: Mapping[str, str], cwd: str, stdout: int, stderr: int, passed: int | None = None
) -> NoReturn:
    """Be the process that was requested."""
    for number, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream, number)
        os.close(stream)
    # What the first process wrote to may have been no terminal, or one.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    measured = "MALLOC_ARENA_MAX" in os.environ
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    words = [str(passed) if word == _PASSED else word for word in words]
    code: Any = 0
    try:
        if words[1:2] == ["autoaccum.devices.child"]:
            from autoaccum.devices.command import supervisor

            supervisor.start_command = start_command
            _run(*words)
        elif "AUTOACCUM_COMMAND" in os.environ:
            from autoaccum.devices.command.watch import start

            start()
            _run(*words)
        else:  # Its own children are copies, too, if it has the settings for them.
            own = Nursery.fork()
            with warmed(lambda of_measured: own if measured or not of_measured else None):
                _run(*words)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    # As Python ends, but for taking down every module, which takes half a second of a processor.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(first: str, *rest: str) -> None:
    """Run a module, code or a script with its words."""
    if first == "-m":
        sys.argv = list(rest)
        sys.path.insert(0, "")
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
