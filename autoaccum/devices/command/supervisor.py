"""Runs a command, and ends everything that it started: the handler of a child that does nothing else.

The child is the parent of all processes that are left over (PR_SET_CHILD_SUBREAPER, prctl(2)), also of those with a
session of their own. When autoaccum itself is killed, it ends the command and removes its files before it leaves.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autoaccum.devices.child.requests import Handler, Request
from autoaccum.devices.command.settings import SETTINGS, ProcessReport, WatchSettings, read_report, write_record
from autoaccum.devices.host_memory import count_oom_kills
from autoaccum.errors import UsageError
from autoaccum.sources.command import cannot_run

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.5
"""The time between looks for processes without the hook: less than the import of PyTorch takes."""
_POLITE_SECONDS: Final = 3.0
"""The time that processes have to end after SIGTERM, as launchers do for those they started."""
_OTHER_RANKS_SECONDS: Final = 30.0
_LAST_WORDS_SECONDS: Final = 5.0
"""The time in which a command ends that has failed: launchers gather the errors of their ranks."""
_TAIL_LINES: Final = 40
_TAIL_BYTES: Final = 1 << 16
start_command: Callable[..., Any] = subprocess.Popen
"""Starts the command; tests set one that copies a process which has imported PyTorch."""


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """How a run of a command ended.

    Attributes:
        reports: Those of its processes that imported PyTorch and have ended, or made their last update, in that order.
        exit_status: Its exit status, negative for a signal; None: it was ended after its last update.
        timed_out: Whether it was ended because it took too long.
        is_oom_kill: Whether the kernel killed a process meanwhile for lack of memory.
        updates: The most updates that one of its processes made; None: none has imported PyTorch.
        output: The last lines that it printed.
        seconds: How long it ran.
    """

    reports: tuple[ProcessReport, ...] = ()
    exit_status: int | None = None
    timed_out: bool = False
    is_oom_kill: bool = False
    updates: int | None = None
    output: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunCommand(Request[CommandEnd]):
    """Run a command until its last update, its end, or the limit on time.

    Attributes:
        words: The command.
        folder: The folder it runs in.
        environment: Its environment, without the settings.
        settings: What its processes are told.
        limit_seconds: The limit on time.
        shows_output: Whether its output is passed on.
    """

    words: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    settings: WatchSettings
    limit_seconds: float
    shows_output: bool = False

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"micro-batch {self.settings.micro_batch}"


class Supervisor(Handler):
    """Handles `RunCommand`."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(_PR_SET_PDEATHSIG, 0)  # It outlives its parent until everything is removed.

    def handle(self, request: Any) -> Any:
        """As `Handler.handle`."""
        if not isinstance(request, RunCommand):
            return super().handle(request)
        settings = request.settings
        try:
            return self._run(request)
        finally:
            _end_descendants()
            if self.connection.parent_has_gone:
                shutil.rmtree(settings.folder, ignore_errors=True)

    def _run(self, request: RunCommand) -> CommandEnd:
        settings, began, kills = request.settings, time.monotonic(), count_oom_kills()
        path, printed = Path(settings.folder, "settings.json"), Path(settings.folder, "output.txt")
        Path(settings.folder).mkdir(mode=0o700)
        settings.temporary.mkdir()
        write_record(path, settings)
        with printed.open("wb") as output:
            try:
                process = start_command(
                    request.words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=request.folder,
                    env={**request.environment, SETTINGS: str(path)},
                    start_new_session=True,
                )
            except OSError as error:
                raise cannot_run(request.words[0], error) from error
        shown = _shown(printed) if request.shows_output else iter(())
        deadline, all_by, look_at = began + request.limit_seconds, float("inf"), began
        timed_out, reports = False, _read_reports(settings)
        while process.poll() is None and not self.connection.parent_has_gone:
            next(shown, None)
            if time.monotonic() > look_at:
                _check_hook(request.environment["PYTHONPATH"].partition(os.pathsep)[0])
                look_at = time.monotonic() + _LOOK_SECONDS
            reports = _read_reports(settings)
            last = [report for report in reports if report.updates >= settings.updates]
            failed = any(report.failure is not None for report in reports)
            if last and (settings.card is not None or len(last) >= last[0].world_size):
                break
            if last or failed:
                all_by = min(all_by, time.monotonic() + (_LAST_WORDS_SECONDS if failed else _OTHER_RANKS_SECONDS))
            timed_out = time.monotonic() > deadline
            if timed_out or time.monotonic() > all_by:
                break
            time.sleep(_POLL_SECONDS)
        exit_status, reports = process.poll(), _read_reports(settings)  # Launchers fail when they are ended.
        seconds = time.monotonic() - began
        _end_descendants(process.pid)
        next(shown, None)
        return CommandEnd(
            reports=reports,
            exit_status=exit_status,
            timed_out=timed_out,
            is_oom_kill=count_oom_kills() > kills,
            updates=max((int(path.read_text() or 0) for path in settings.reports.glob("*.updates")), default=None),
            output=_tail(printed),
            seconds=seconds,
        )


def _check_hook(hook: str) -> None:
    """Raise UsageError if a process that has loaded PyTorch has another PYTHONPATH, without the folder of the hook."""
    for pid in _descendants():
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            named = dict(variable.partition("=")[::2] for variable in variables)
            path = named.get("PYTHONPATH", "")
            if SETTINGS not in named or hook in path.split(os.pathsep):
                continue
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                raise UsageError(
                    f"the command sets PYTHONPATH to {path!r}, and autoaccum enters its processes through it",
                    hint="set it before autoaccum, or let the command add to it in a shell: PYTHONPATH=.:$PYTHONPATH",
                )


def _read_reports(settings: WatchSettings) -> tuple[ProcessReport, ...]:
    """Return the reports as they came: where several processes fail, the first one says why."""
    paths = sorted(settings.reports.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return tuple(map(read_report, paths))


def _tail(path: Path) -> str:
    """Return the last lines of a file, which may be huge."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _shown(path: Path) -> Iterator[None]:
    """Print what a file got since the last time, at each step."""
    with path.open(errors="replace") as file:
        while True:
            sys.stdout.write(file.read())
            sys.stdout.flush()
            yield


def _end_descendants(group: int | None = None) -> None:
    """End the command's process group and all other processes that descend from this one: first politely.

    Those that are ended leave their children to this process, so it looks until there are none.
    """
    deadline = time.monotonic() + _POLITE_SECONDS
    if group is not None:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
    told: set[int] = set()
    while pids := _descendants():
        force = time.monotonic() > deadline
        for pid in pids:
            if force or pid not in told:
                told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
        _reap()
        time.sleep(0.02)


def _descendants() -> list[int]:
    """Return the ids of all live processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, waiting = list[int](), [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
