"""The parent's side of a child process: start it, call it over a private connection, notice its death, end it.

A child is a new Python (`sys.executable -m`), never a fork of this one: that hangs after an OpenMP region, and
multiprocessing's spawn imports the user's script again. It has a session of its own, so that Ctrl-C in the terminal
reaches only the parent, which then ends the child's whole process group.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import autoaccum
from autoaccum.devices.child.failures import ChildDied, Failure, JobFailed, failure_error
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Prepare, Reply, Request
from autoaccum.devices.host_memory import count_oom_kills
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.units import MIB

PACKAGE_ROOT = Path(autoaccum.__file__).resolve().parents[1]
"""The folder that `autoaccum` was imported from; the child imports the same."""

_MALLOC_SETTINGS = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_INSIDE = "AUTOACCUM_INSIDE_CHILD"
"""Set in every child: a script that plans at its top level and is its own workload would start children without end."""

_OF_RANKS = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w*)")
"""What a launcher sets for a rank; a child is alone, whatever its parent is."""
start_process: Callable[..., Any] = subprocess.Popen
"""Starts the process of every child; tests set one that copies a process which has imported PyTorch."""

_MODULE = "autoaccum.devices.child"
_STDERR = 2
_START_SECONDS = 300.0
"""A short limit on time must not end the import of PyTorch from a cold disk."""
TOO_LONG_HINT = "look for what does not end there, or raise --time-limit or --trial-limit"
_SIGNAL_NAMES = {int(known): known.name for known in signal.Signals}
_POLL_SECONDS = 0.2
_LEAVE_POLL_SECONDS = 0.01
_KILL_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_CHUNK_BYTES = 2 * MIB


def child_environment(*, measured: bool = True) -> dict[str, str]:
    """Return this process's environment, with settings that make a child's memory repeatable.

    glibc's malloc then has one arena and returns freed memory at once (its manual, "Memory Allocation Tunables").
    Python uses malloc, too: its own allocator takes 1 MiB at a time, either before or after the limit is set. A build
    without the GIL cannot choose. These settings cost an eighth of a simulation's time, so a child whose memory is not
    `measured` goes without. Hashes of strings are fixed, and the child imports this same autoaccum.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))
    alone = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    shared = {**alone, "PYTHONHASHSEED": "0", "PYTHONPATH": path, _INSIDE: "1"}
    python = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"PYTHONMALLOC": "malloc"}
    return {**shared, **_MALLOC_SETTINGS, **python} if measured else shared


class ChildProcess:
    """A child started as `python -m autoaccum.devices.child`, which imports what its handler needs meanwhile.

    stdin is empty; stdout and stderr go to this process's stderr, or line by line to `on_output`. The kernel ends a
    child together with the *thread* that started it, so that thread has to live on.

    Attributes:
        owner: What runs out of memory if it does, in messages.
        calls: The number of jobs so far.

    Args:
        handler: The class that handles its requests, as `package.module:Name` (`requests.Handler`).
        on_output: Gets each line that it prints.
        measured: Whether its memory is measured; one that is not is faster (`child_environment`).
        paths: Where its modules are; None: where this process finds them.
        owner: As the attribute.
        grace_seconds: The time that it has to end by itself what it started, whenever it is ended.

    Raises:
        UsageError: This process is such a child itself.
        NotMeasuredError: It cannot be started.
    """

    def __init__(
        self,
        handler: str,
        *,
        on_output: Callable[[str], None] | None = None,
        measured: bool = True,
        paths: ImportPaths | None = None,
        owner: str = "the machine",
        grace_seconds: float = 0.0,
    ) -> None:
        if _INSIDE in os.environ:
            raise UsageError(
                "a workload starts trials while it is being loaded or tried",
                hint='put what starts them under if __name__ == "__main__":',
            )
        self._on_output = on_output
        self._printed = b""
        self._ended = False
        self.owner, self.calls, self._grace_seconds = owner, 0, grace_seconds
        self._connection, theirs = Pipe()
        try:
            self._process = start_process(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if on_output else _STDERR,
                stderr=subprocess.STDOUT,
                bufsize=0,
                cwd=PACKAGE_ROOT,
                env=child_environment(measured=measured),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._connection.close()
            raise NotMeasuredError(f"no process could be started for trials: {error}") from error
        finally:
            theirs.close()
        self._watched: list[Any] = [self._connection]
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
            self._watched.append(self._process.stdout)
        paths = paths or ImportPaths.of()
        self._preparing: Prepare | None = Prepare(handler=handler, paths=paths)
        self._send(self._preparing)

    @property
    def pid(self) -> int:
        """The process id, which is also that of its process group."""
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Return whether it can be called."""
        return not self._ended

    def call(self, request: Request[Reply], limit_seconds: float) -> Reply:
        """Send a request and wait for its reply; the limit begins when the child has started.

        Raises:
            JobFailed: The job failed, and the child can run another.
            ChildDied: It died or took too long, and was ended.
        """
        self.post(request)
        return self.receive(request, limit_seconds)

    def post(self, request: Request[Any]) -> None:
        """Send a request, whose reply is to be received later, so that several children can work at once."""
        self.calls += 1
        self._send(request)

    def receive(self, request: Request[Reply], limit_seconds: float) -> Reply:
        """Wait for the reply to the request that was posted last; raises as `call`."""
        self._wait_for_start()
        return self._wait_for_reply(request, limit_seconds)

    def run(self, request: Request[Reply], limit_seconds: float) -> Reply:
        """Run a job as `call`, except that a failure ends the child, and is raised as what it means to the user.

        Raises:
            WorkloadError: The workload fails.
            DoesNotFitError: It runs out of memory.
            NotMeasuredError: The child died or took too long.
        """
        try:
            return self.call(request, limit_seconds)
        except JobFailed as failed:
            self.close()
            raise failure_error(failed.failure, self.owner) from None

    def has_died(self) -> bool:
        """Return whether it has ended, by itself or by `end`."""
        return self._ended or self._death() is not None

    def close(self) -> None:
        """End it after some seconds to exit by itself, so that the workload's `atexit` functions run."""
        self.end(grace_seconds=_LEAVE_SECONDS)

    def end(self, *, grace_seconds: float = 0.0) -> None:
        """End it and every process it started, after `grace_seconds` to exit by itself. Idempotent."""
        if self._ended:
            return
        self._ended = True
        grace_seconds = max(grace_seconds, self._grace_seconds)
        try:
            self._connection.close()
            deadline = time.monotonic() + grace_seconds
            while self._death() is None and time.monotonic() < deadline:
                self._pass_output()
                time.sleep(_LEAVE_POLL_SECONDS)
        finally:
            # It is not reaped yet, so no other process can have its id.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
            self._pass_output(last=True)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _wait_for_start(self) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            self._wait_for_reply(preparing, _START_SECONDS)

    def _send(self, request: Request[Any]) -> None:
        """Send a request; a child that has died is noticed when its reply is waited for."""
        self._kills_before = count_oom_kills()
        with suppress(ConnectionError):
            self._connection.send_bytes(request.to_json())

    def _wait_for_reply(self, request: Request[Reply], limit_seconds: float) -> Reply:
        began = time.monotonic()
        try:
            message = self._receive(request.doing, limit_seconds)
        except BaseException as error:
            self.end()
            if isinstance(error, ChildDied):
                error.seconds = time.monotonic() - began
            raise
        return request.read_reply(message)

    def _receive(self, doing: str, limit_seconds: float) -> bytes:
        deadline = time.monotonic() + limit_seconds
        while True:
            death = self._death()
            self._pass_output()  # After the check of its death, so that all it wrote is read.
            try:
                if self._connection.poll():
                    reply = self._connection.recv_bytes()
                    self._pass_output()
                    return reply
            except (EOFError, OSError):  # OSError: it died within a reply.
                raise self._describe_death(doing, death or self._death(wait_seconds=2.0)) from None
            if death is not None:
                raise self._describe_death(doing, death)
            left = deadline - time.monotonic()
            if left <= 0:
                message = f"{doing} took longer than {round(limit_seconds, 1):g} s, and was ended: {TOO_LONG_HINT}"
                raise ChildDied(Failure(outcome="error", message=message, fault="measurement"), timed_out=True)
            wait(self._watched, min(_POLL_SECONDS, left))

    def _pass_output(self, *, last: bool = False) -> None:
        """Pass on the output so far, without waiting for more."""
        if self._on_output is None or self._process.stdout is None:
            return
        if self._process.stdout in self._watched:
            chunk = self._process.stdout.read(_CHUNK_BYTES)
            if chunk == b"":
                self._watched.remove(self._process.stdout)
            self._printed += chunk or b""
        *lines, self._printed = self._printed.split(b"\n")
        if last and self._printed:
            lines.append(self._printed)
        for line in lines:
            self._on_output(line.decode("utf-8", errors="replace"))

    def _death(self, *, wait_seconds: float = 0.0) -> os.waitid_result | None:
        """Return how it died, without reaping it; None while it lives."""
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                death = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return None
            if death is not None or time.monotonic() >= deadline:
                return death
            time.sleep(_LEAVE_POLL_SECONDS)

    def _describe_death(self, doing: str, death: os.waitid_result | None) -> ChildDied:
        number = None
        if death is None:
            text = "closed the connection it answers on"
        elif death.si_code == os.CLD_EXITED:
            text = f"left with exit status {death.si_status}"
        else:
            number = death.si_status
            text = f"was ended by {_SIGNAL_NAMES.get(number, f'signal {number}')}"
        message = f"{doing}: its process {text}"
        if number == signal.SIGKILL and count_oom_kills() > self._kills_before:
            return ChildDied(Failure(outcome="oom", message=f"{message}, by the kernel for lack of memory"))
        return ChildDied(Failure(outcome="error", message=message, fault="measurement"), signal=number)
