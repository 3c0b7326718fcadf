"""The child's side of the private connection: what it is asked and answers, and that it dies with its parent."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.devices.child.checkout import check_loaded

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload

_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"


class ParentConnection:
    """Requests of the parent, a JSON object each, and the answers to them. Standard output is the workload's.

    Made first of all: from then on this process ends with its parent (prctl(2), PR_SET_PDEATHSIG), and is the kernel's
    first choice when memory runs out.

    Args:
        arguments: As `process.ChildProcess` gives them: the descriptor of the connection, and the parent's pid.
    """

    def __init__(self, arguments: list[str]) -> None:
        atexit.register(_leave)  # The first to be registered runs last, after the workload's own.
        descriptor, parent = map(int, arguments)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # It ended before the kernel was asked.
            os._exit(1)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
        faulthandler.enable()
        os.set_inheritable(descriptor, False)
        self._pid = os.getpid()
        self._connection: Connection[Any, Any] = Connection(descriptor)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Requests, until the parent closes its end."""
        while (request := self.read()) is not None:
            yield request

    def read(self) -> Mapping[str, Any] | None:
        """Wait for the next request; None where the parent has closed its end."""
        try:
            request: Mapping[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None
        return request

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Answer a request."""
        if os.getpid() != self._pid:  # A copy the workload made by os.fork: one answer is enough.
            os._exit(0)
        _flush()
        self._connection.send_bytes(json.dumps(reply).encode())


def use_import_paths(request: Mapping[str, Any]) -> None:
    """Find modules and files where the parent does."""
    sys.path[:] = request["sys_path"]
    os.chdir(request["cwd"])
    if request["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = request["pythonpath"]


def load_requested(request: Mapping[str, Any]) -> Workload:
    """The workload that a request names, as it asks for it (`TrialSettings.to_request`)."""
    from autoaccum.devices.child.pickling import unpack
    from autoaccum.options import Options
    from autoaccum.workload.loading import load_workload
    from autoaccum.workload.samples import apply_settings

    parcel = request.get("parcel")
    loaded = load_workload(request["reference"]) if parcel is None else unpack(parcel)
    check_loaded(request["reference"], request.get("checkout", {}))
    options = Options(**request.get("options", {}))
    return apply_settings(loaded, largest_batch=request.get("share"), worst_of=options.worst_of, **options.overrides)


def failure_reply(error: BaseException, doing: str, at: str = "") -> dict[str, Any]:
    """A reply that tells `error`, as `describe_failure` sees it."""
    from autoaccum.devices.child.replies import describe_failure

    return {"failure": dataclasses.asdict(describe_failure(error, doing, at=at))}


def _leave() -> None:
    """Leave without taking down every module: a second saved for each process."""
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # The workload may have closed or replaced them.
            stream.flush()
