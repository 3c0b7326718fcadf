"""The child's side of the private pipe: what it is asked, what it answers, and that it dies with its parent."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"


class Lifeline:
    """Requests of the parent, one line of JSON each, and the answers to them. Standard output is the workload's.

    Made first of all: from then on this process ends with its parent, and is the kernel's first choice when memory
    runs out.

    Args:
        arguments: As `process.ChildProcess` gives them: descriptors of both pipes, and the parent's pid.
    """

    def __init__(self, arguments: list[str]) -> None:
        atexit.register(_leave)  # The first to be registered runs last, after the workload's own.
        requests, self._replies, parent = map(int, arguments)
        _die_with(parent)
        _be_killed_first()
        faulthandler.enable()
        for descriptor in (requests, self._replies):
            os.set_inheritable(descriptor, False)
        self._pid = os.getpid()
        self._requests = os.fdopen(requests, encoding="utf-8")

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Requests, until the parent closes its end."""
        while (request := self.read()) is not None:
            yield request

    def read(self) -> Mapping[str, Any] | None:
        """Wait for the next request; None where the parent has closed its end."""
        line = self._requests.readline()
        request: Mapping[str, Any] | None = json.loads(line) if line else None
        return request

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Answer a request."""
        if os.getpid() != self._pid:  # A copy the workload made by os.fork: one answer is enough.
            os._exit(0)
        _flush()
        _write(self._replies, json.dumps(reply).encode() + b"\n")


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # It ended before the kernel was asked.
        os._exit(1)


def _be_killed_first() -> None:
    """Should the machine run out of memory all the same, its kernel takes this process before any other."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")


def _leave() -> None:
    """Leave without taking down every module: a second saved for each process."""
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # The workload may have closed or replaced them.
            stream.flush()


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
