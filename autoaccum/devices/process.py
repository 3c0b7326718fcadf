"""The parent's side of a child process: start it, ask it over a private pipe, notice how it died, end it.

A child is a new Python (`sys.executable -m`), never a fork: fork hangs after an OpenMP region, and multiprocessing's
spawn imports the user's script again. It lives in a session of its own, so that Ctrl-C in the terminal reaches the
parent alone, which ends the child and all that the child started by its process group.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from autoaccum.devices.checkout import Checkout
from autoaccum.devices.host_memory import count_oom_kills
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.units import MIB

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The folder `autoaccum` was imported from: the child has to find this very one."""

_MALLOC_SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
_HASH_SETTINGS = {"PYTHONHASHSEED": "0"}

_INSIDE = "AUTOACCUM_INSIDE_CHILD"
"""Set in every child: a script that plans at its top level and is its own workload would start children for ever."""

_POLL_SECONDS = 0.2
_LEAVE_POLL_SECONDS = 0.01
_KILL_SECONDS = 10.0
_CHUNK_BYTES = 65536
_MOST_CHUNKS = 32
_LONGEST_REPLY_BYTES = 64 * 1024**2

Death = Literal["signal", "exit", "limit", "pipe"]


class ChildDied(Exception):
    """A child that will not answer any more, and has been ended; its text is a predicate ("was ended by SIGSEGV").

    Attributes:
        kind: "signal" or "exit": by itself; "limit": it took too long and was ended; "pipe": it closed the pipe or
            wrote something else than an answer there, and was ended.
        out_of_memory: It died by SIGKILL, and the kernel's count of kills for lack of memory rose meanwhile.
        number: The signal's, where the kind is "signal".
        seconds: From the request until its end was noticed.
    """

    def __init__(self, kind: Death, text: str, *, out_of_memory: bool = False, number: int | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.out_of_memory = out_of_memory
        self.number = number
        self.seconds = 0.0


def child_environment(*, measured: bool = True) -> dict[str, str]:
    """This process's environment, with what makes memory in a child repeatable.

    glibc's malloc gives back what is freed at once, from one arena (its manual, "Memory Allocation Tunables"). Python
    uses it too: its own allocator takes 1 MiB at a time, by chance before or after the limit is set. A build without
    the GIL has no choice of allocator. That takes an eighth of a simulation's time, whose own memory is not `measured`.
    A set of names is in the same order each time. The child finds this very autoaccum.
    """
    shared = {**os.environ, **_HASH_SETTINGS, "PYTHONPATH": _python_path(), _INSIDE: "1"}
    python = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"PYTHONMALLOC": "malloc"}
    return {**shared, **_MALLOC_SETTINGS, **python} if measured else shared


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))


class ChildProcess:
    """`python -m MODULE REQUESTS REPLIES PARENT`: file descriptors of two pipes and the pid it has to die with.

    Every request and every reply is one line of JSON. stdin is empty; stdout and stderr go to this process's stderr,
    or line by line to `on_output`; what is not `measured` is faster (`child_environment`). The kernel ends a child
    together with the *thread* that started it, so start and use it from one that lives on.

    Raises:
        UsageError: This process is such a child itself.
        NotMeasuredError: It cannot be started.
    """

    def __init__(self, module: str, *, on_output: Callable[[str], None] | None = None, measured: bool = True) -> None:
        if _INSIDE in os.environ:
            raise UsageError(
                "a workload starts trials while it is being loaded or tried",
                hint='put what starts them under if __name__ == "__main__":',
            )
        if not sys.executable:
            raise NotMeasuredError("sys.executable is empty, so no process can be started for trials")
        self._on_output = on_output
        self._pending = b""
        self._printed = b""
        self._ended = False
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe() if on_output else (-1, _stderr())
        theirs = [requests, replies, output] if on_output else [requests, replies]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(requests), str(replies), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=PACKAGE_ROOT,
                env=child_environment(measured=measured),
                pass_fds=(requests, replies),
                start_new_session=True,
            )
        except OSError as error:
            theirs += [self._requests, self._replies, *([self._output] if on_output else [])]
            raise NotMeasuredError(f"no process could be started for trials: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._inputs = selectors.DefaultSelector()
        for descriptor in [self._replies, *([self._output] if on_output else [])]:
            os.set_blocking(descriptor, False)
            self._inputs.register(descriptor, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._ended

    def ask(
        self, request: Mapping[str, Any], limit_seconds: float, is_stopped: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Send a request and wait for its reply; unless there is one, the child is ended.

        Args:
            request: What to send.
            limit_seconds: How long to wait.
            is_stopped: Asked meanwhile; whether nobody waits for the reply any more.

        Raises:
            ChildDied: There will be no reply: see its `kind`.
            KeyboardInterrupt: `is_stopped` says so.
        """
        kills_before = count_oom_kills()
        began = time.monotonic()
        try:
            self.tell(request)
            return self._receive(limit_seconds, kills_before, is_stopped or (lambda: False))
        except ChildDied as death:
            self.end()
            death.seconds = time.monotonic() - began
            raise
        except BaseException:
            self.end()
            raise

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request that has no reply, and do not wait; a child that is gone is noticed when it is asked."""
        with suppress(BrokenPipeError):
            _write(self._requests, json.dumps(request).encode() + b"\n")

    def has_died(self) -> bool:
        """Whether it has ended, by itself or by `end`."""
        return self._ended or self._death() is not None

    def end(self, *, grace_seconds: float = 0.0) -> None:
        """End it and everything it started; before that, let it leave by itself for `grace_seconds`. Idempotent."""
        if self._ended:
            return
        self._ended = True
        try:
            os.close(self._requests)
            deadline = time.monotonic() + grace_seconds
            while self._death() is None and time.monotonic() < deadline:
                self._take_in()
                time.sleep(_LEAVE_POLL_SECONDS)
        finally:
            # Not reaped yet, so nobody else can have been given its id.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
            self._take_in()
            self._pass_output(last=True)
            self._inputs.close()
            os.close(self._replies)
            if self._on_output:
                os.close(self._output)

    def _receive(self, limit_seconds: float, kills_before: int, is_stopped: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + limit_seconds
        while True:
            if is_stopped():
                raise KeyboardInterrupt
            death = self._death()
            self._take_in()  # After the look at its death: all that it wrote is there.
            line, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                return _parse(line)
            if len(line) > _LONGEST_REPLY_BYTES:
                raise ChildDied("pipe", "flooded the pipe it answers on")
            if death is not None or self._replies not in self._inputs.get_map():
                raise _describe_death(death or self._death(wait_seconds=2.0), kills_before)
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildDied("limit", f"was ended after {limit_seconds:g} s")
            self._inputs.select(min(_POLL_SECONDS, left))

    def _take_in(self) -> None:
        """Read what has arrived, without waiting; an input at its end is no longer watched."""
        for key in list(self._inputs.get_map().values()):
            with suppress(BlockingIOError):
                for _ in range(_MOST_CHUNKS):  # Not without end: whoever floods a pipe has to run into the limit.
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    if not chunk:
                        self._inputs.unregister(key.fd)
                        break
                    if key.fd == self._replies:
                        self._pending += chunk
                    else:
                        self._printed += chunk
        self._pass_output()

    def _pass_output(self, *, last: bool = False) -> None:
        if self._on_output is None:
            return
        *lines, self._printed = self._printed.split(b"\n")
        if last and self._printed:
            lines.append(self._printed)
            self._printed = b""
        for line in lines:
            self._on_output(line.decode("utf-8", errors="replace"))

    def _death(self, *, wait_seconds: float = 0.0) -> os.waitid_result | None:
        """How it died, without reaping it; None while it lives."""
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                death = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return None
            if death is not None or time.monotonic() >= deadline:
                return death
            time.sleep(_LEAVE_POLL_SECONDS)


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        shown = line[:80].decode("utf-8", errors="replace")
        raise ChildDied("pipe", f"wrote something else than an answer to its pipe ({shown!r})")
    return reply


def _describe_death(death: os.waitid_result | None, kills_before: int) -> ChildDied:
    if death is None:
        return ChildDied("pipe", "closed the pipe it answers on")
    if death.si_code == os.CLD_EXITED:
        return ChildDied("exit", f"left with exit status {death.si_status}")
    number = death.si_status
    name = {int(known): known.name for known in signal.Signals}.get(number, f"signal {number}")
    if number == signal.SIGKILL and count_oom_kills() > kills_before:
        return ChildDied("signal", "was killed by the kernel (SIGKILL) for lack of memory", out_of_memory=True)
    return ChildDied("signal", f"was ended by {name}", number=number)


def _stderr() -> int:
    """Descriptor 2, or nowhere when this process was started without one."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


_MODULE = "autoaccum.devices.child"

SPARE_BYTES = 512 * MIB
"""Host memory that has to be free beyond the budget before a spare is kept: it takes about 230 MiB (torch 2.13), and
as much again should stay free."""


def start_child(
    on_output: Callable[[str], None] | None = None, *, simulated: bool = False, checkout: Checkout | None = None
) -> ChildProcess:
    """Start a child of `devices.child` and have it import what all of them need; does not wait for that.

    Args:
        on_output: Gets each line it prints; None: it goes to stderr.
        simulated: It is to simulate a card, which needs more of PyTorch.
        checkout: Where its modules lie; None: where this process finds them.

    Raises:
        UsageError: This process is such a child itself.
        NotMeasuredError: It cannot be started.
    """
    process = ChildProcess(_MODULE, on_output=on_output, measured=not simulated)
    process.tell({"job": "prepare", "simulated": simulated, **where_to_import(checkout)})
    return process


def where_to_import(checkout: Checkout | None = None) -> Mapping[str, Any]:
    """Where modules are found in this process, or in a checkout instead, as a child is told."""
    pythonpath = os.environ.get("PYTHONPATH")
    if checkout is None:
        return {"cwd": os.getcwd(), "sys_path": sys.path, "pythonpath": pythonpath}  # noqa: PTH109
    return {
        "cwd": str(checkout.folder),
        "sys_path": [checkout.map_entry(entry) for entry in sys.path],
        "pythonpath": None if pythonpath is None else checkout.map_path(pythonpath),
        "checkout": checkout.to_record(),
    }


class SpareChild:
    """One child that nobody has asked anything yet; whoever takes it has to end it.

    Args:
        on_output: Gets each line it prints; None: it goes to stderr.
        checkout: As in `start_child`.

    Raises:
        UsageError, NotMeasuredError: As `start_child`.
    """

    def __init__(
        self,
        on_output: Callable[[str], None] | None = None,
        checkout: Checkout | None = None,
    ) -> None:
        self._started_in = _surroundings()
        self._process = start_child(on_output, checkout=checkout)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def take(self) -> ChildProcess | None:
        """The process, or None if it has died meanwhile or was started in other surroundings than now."""
        if self._process.has_died() or self._started_in != _surroundings():
            self.end()
            return None
        return self._process

    def end(self) -> None:
        """End it at once: it holds nothing that anybody would miss."""
        self._process.end()


def _surroundings() -> tuple[object, ...]:
    """What a child inherits or is told when it starts."""
    return child_environment(), list(sys.path), sys.executable
