"""Who runs a trial, and whether a worker of this very machine is still there."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_ENDED = ("Z", "X", "x")
_STATE_FIELD, _STARTED_FIELD = 0, 19
"""Of /proc/PID/stat, counted behind the name's closing bracket (proc(5): fields 3 and 22)."""


@dataclass(frozen=True)
class Worker:
    """A process that runs trials.

    Attributes:
        host: The machine's name.
        pid: Its process id.
        machine: This start of the machine's kernel, and the namespace `pid` belongs to: containers may share a host's
            name, and have processes of the same numbers. None where that is not known.
        started: When the process started, in the kernel's ticks; None likewise.
    """

    host: str
    pid: int
    machine: str | None
    started: int | None

    @classmethod
    def here(cls) -> Worker:
        """This process."""
        pid = os.getpid()
        try:
            started = _started(pid)
        except OSError:
            started = None
        return cls(socket.gethostname(), pid, _machine(), started)

    @classmethod
    def read(cls, record: Any) -> Worker | None:
        """What `to_record` wrote; None where it is none."""
        try:
            return cls(**record)
        except TypeError:
            return None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.host}:{self.pid}"

    def to_record(self) -> dict[str, Any]:
        """As what JSON knows."""
        return asdict(self)

    def is_gone(self) -> bool:
        """Whether it surely does not live any more; False for one of another machine, whose heartbeat tells."""
        if self.machine is None or self.started is None or self.machine != _machine():
            return False
        try:
            return _started(self.pid) != self.started
        except OSError:
            return not _answers(self.pid)


def _machine() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """When a process started; None where it has ended, but is still there.

    Raises:
        OSError: It is not there, or not shown: /proc may be mounted so that each user sees only their own (`hidepid`).
    """
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None if fields[_STATE_FIELD] in _ENDED else int(fields[_STARTED_FIELD])


def _answers(pid: int) -> bool:
    """Whether there is a process of that number, whoever's it is; nothing is sent to it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
