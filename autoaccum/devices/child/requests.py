"""Requests to a child and their replies, which cross a private connection as JSON; and the child's side of it.

To add a job: a subclass of `Request`, typed with its reply, and a method for it in the `Handler` of the child.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from autoaccum.devices.child.failures import Failure, JobFailed, describe_failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.errors import UsageError
from autoaccum.serialization import read_record

Reply = TypeVar("Reply")
_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"
_HAS_REPLIED = 101  # The exit status of a copy that has.


class Request(Generic[Reply]):
    """A job for a child; a subclass is a frozen dataclass, and its type argument the type of the reply.

    Attributes:
        may_be_refused: Whether a UsageError that ends it is raised as one; it is the workload's fault otherwise.
        in_copy: Whether a copy of the process runs it, which has to allow that (`can_be_copied`), and stays as it is.
    """

    may_be_refused = in_copy = False

    @property
    def doing(self) -> str:
        """The job as the subject of a message, such as `loading model.py`."""
        raise NotImplementedError

    def to_json(self) -> bytes:
        """Encode the request for `read_request`."""
        kind = type(self)
        return _to_json({"request": f"{kind.__module__}:{kind.__qualname__}", "fields": vars(self)})

    def read_reply(self, message: bytes) -> Reply:
        """Return the reply in a message that `ParentConnection` sent; raise JobFailed if it is a failure."""
        answer = json.loads(message)
        if "failure" in answer:
            raise JobFailed(read_record(answer["failure"], Failure))
        base: Any = getattr(type(self), "__orig_bases__")[0]  # noqa: B009
        (kind,) = get_args(base)
        reply: Reply = read_record(answer["reply"], kind)
        return reply


@dataclass(frozen=True, kw_only=True)
class Prepare(Request[None]):
    """Import what every workload needs, before there is one; the first request.

    Attributes:
        handler: The subclass of `Handler` for all later requests, as `package.module:Name`.
        paths: Where its modules are.
    """

    handler: str
    paths: ImportPaths

    doing = "starting a process"


def reply_to_json(reply: Any) -> bytes:
    """Encode a reply, or a `Failure`, for `Request.read_reply`; records become objects with their fields."""
    return _to_json({"failure" if isinstance(reply, Failure) else "reply": reply})


def _to_json(message: Any) -> bytes:
    return json.dumps(
        message, default=lambda record: dict(record) if isinstance(record, Mapping) else vars(record)
    ).encode()


def read_request(message: bytes) -> Request[Any]:
    """Return the request in a message; its class is imported here."""
    plain = json.loads(message)
    request: Request[Any] = read_record(plain["fields"], _find_class(plain["request"]))
    return request


def _find_class(name: str) -> Any:
    """Import the class that is called `package.module:Name`."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)


class Handler:
    """What runs the jobs of a child, one after the other.

    Attributes:
        paths: Where the modules of a child are; None: it is none.
        connection: The connection to the parent, for a job that is a conversation; its last reply is made by `serve`.
    """

    paths: ImportPaths | None = None
    connection: ParentConnection

    @staticmethod
    def prepare() -> None:
        """Import what every workload needs."""

    def handle(self, request: Any) -> Any:
        """Return the reply to a request, or a `Failure`; what it raises becomes one."""
        raise NotImplementedError(request)


class ParentConnection:
    """The connection to the parent; each message is a JSON object.

    It is made before anything else: from then on this process ends with its parent (prctl(2), PR_SET_PDEATHSIG), and
    is the first that the kernel kills when memory runs out.

    Args:
        arguments: The descriptor of the connection, and the parent's pid (`process.ChildProcess`).
    """

    def __init__(self, arguments: list[str]) -> None:
        atexit.register(_leave)  # Before all others, so that it runs last.
        remove_semaphores: Any = util._exit_function  # type: ignore[attr-defined]
        atexit.unregister(remove_semaphores)
        atexit.register(remove_semaphores)
        descriptor, parent = map(int, arguments)
        _end_with(parent)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
        faulthandler.enable()
        os.set_inheritable(descriptor, False)
        self._pid = os.getpid()
        self._connection: Connection[Any, Any] = Connection(descriptor)

    def read(self) -> Request[Any] | None:
        """Wait for the next request; return None if the parent has closed its end."""
        try:
            message = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            return None
        return read_request(message)

    def copy_process(self) -> bool:
        """Return True in a copy of this process; in this one False if the copy replied, or it dies as that did."""
        parent, copy = os.getpid(), os.fork()
        if copy == 0:
            _end_with(parent)
            self._pid = os.getpid()
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        if code < 0:
            faulthandler.disable()  # The copy's has told.
            os.kill(parent, -code)
        if code != _HAS_REPLIED:
            os._exit(code)
        return False

    @property
    def parent_has_gone(self) -> bool:
        """Whether the parent has closed its end, or was ended; while a job runs, it sends nothing."""
        return bool(self._connection.poll())

    def reply(self, reply: Any) -> None:
        """Reply to a request, by a `Failure` where its job failed."""
        if os.getpid() != self._pid:  # A copy that the workload made by os.fork: only the original answers.
            os._exit(0)
        _flush()
        try:
            self._connection.send_bytes(reply_to_json(reply))
        except ConnectionError:  # The parent has been ended, and nobody waits for the answer.
            os._exit(1)


def serve(connection: ParentConnection) -> None:
    """Reply to requests until the parent closes its end; the first one says which class handles all others."""
    first = connection.read()
    if first is None:
        return
    assert isinstance(first, Prepare)
    _prepare(first)
    connection.reply(None)
    handler: Handler | None = None
    while (request := connection.read()) is not None:
        if request.in_copy and not connection.copy_process():
            continue
        try:
            if handler is None:
                handler = _find_class(first.handler)()
                handler.paths, handler.connection = first.paths, connection
            reply = handler.handle(request)
        except BaseException as error:
            is_usage = request.may_be_refused and isinstance(error, UsageError)
            reply = replace(describe_failure(error, request.doing), is_usage=is_usage)
        connection.reply(reply)
        if request.in_copy:
            os._exit(_HAS_REPLIED)


def can_be_copied() -> bool:
    """Return whether this thread is the only one, but for those that end before a fork, as those of OpenBLAS do.

    A copy has no other threads: it would wait for them forever, such as for OpenMP's (GNU's libgomp).
    """
    copy = os.fork()
    if copy == 0:
        os._exit(0)
    os.waitpid(copy, 0)
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends (prctl(2)), or end it if that has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _prepare(request: Prepare) -> None:
    """Import what the handler needs; what goes wrong here goes wrong again when the workload is loaded.

    To look for garbage takes a fifth of the time; in what is imported here it is never looked for.
    """
    request.paths.use()
    gc.disable()
    with suppress(Exception):
        _find_class(request.handler).prepare()
    gc.freeze()
    gc.enable()


def _leave() -> None:
    """Exit without tearing down every module, which saves a second per process."""
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # The workload may have closed or replaced it.
            stream.flush()
