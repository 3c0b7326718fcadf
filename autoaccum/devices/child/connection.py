"""The child's side of the private connection to its parent, with which it also ends."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.child.requests import Request, read_request, to_json

_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"


class ParentConnection:
    """The connection to the parent; each message is a JSON object.

    It is made before anything else: from then on this process ends with its parent (prctl(2), PR_SET_PDEATHSIG), and
    is the first that the kernel kills when memory runs out.

    Args:
        arguments: The descriptor of the connection, and the parent's pid (`process.ChildProcess`).
    """

    def __init__(self, arguments: list[str]) -> None:
        atexit.register(_leave)  # Before all others, so that it runs last.
        descriptor, parent = map(int, arguments)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # The parent ended before the prctl.
            os._exit(1)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
        faulthandler.enable()
        os.set_inheritable(descriptor, False)
        self._pid = os.getpid()
        self._connection: Connection[Any, Any] = Connection(descriptor)

    def read(self) -> Mapping[str, Any] | None:
        """Wait for the next message; return None if the parent has closed its end."""
        try:
            request: Mapping[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None
        return request

    def reply(self, reply: Any) -> None:
        """Reply to a request, by a `Failure` where its job failed."""
        self.answer({"failure" if isinstance(reply, Failure) else "reply": reply})

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answer a message."""
        if os.getpid() != self._pid:  # A copy that the workload made by os.fork: only the original answers.
            os._exit(0)
        _flush()
        try:
            self._connection.send_bytes(to_json(message))
        except ConnectionError:  # The parent has been ended, and nobody waits for the answer.
            os._exit(1)


def serve(connection: ParentConnection, handle: Callable[[Request[Any]], Any]) -> None:
    """Reply to requests until the parent closes its end; `handle` returns a reply, or a `Failure` in place of it."""
    while (message := connection.read()) is not None:
        connection.reply(handle(read_request(message)))


def _leave() -> None:
    """Exit without tearing down every module, which saves a second per process."""
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # The workload may have closed or replaced it.
            stream.flush()
