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
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe, process, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from autoaccum.devices.child.failures import Failure, JobFailed, describe_failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.errors import UsageError
from autoaccum.serialization import read_record

Reply = TypeVar("Reply")
_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"
_STAYS, _ENDS = b"stays", b"ends"
_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 5


class Request(Generic[Reply]):
    """A job for a child; a subclass is a frozen dataclass, and its type argument the type of the reply.

    Attributes:
        may_be_refused: Whether a UsageError that ends it is raised as one; it is the workload's fault otherwise.
        copy: A copy of the process runs it, a `new` one or the one that is `kept` for such, and the process stays as it
            is, which has to be one that `can_be_copied`; None: the process itself runs it.
    """

    may_be_refused = False
    copy: Literal["new", "kept"] | None = None

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
        is_spoilt: Whether no other job is to run in a copy that is kept.
    """

    is_spoilt = False
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
        self._original: Connection[Any, Any] | None = None
        self._kept: tuple[int, Connection[Any, Any]] | None = None

    def read(self) -> Request[Any] | None:
        """Wait for the next request; return None if the parent has closed its end."""
        try:
            message = (self._original or self._connection).recv_bytes()
        except (EOFError, ConnectionError):
            return None
        return read_request(message)

    def passes_on(self, request: Request[Any]) -> bool:
        """Have a copy of this process reply, and return True, or die as that dies; False in a copy that is to reply."""
        if request.copy is None or self._original is not None:
            return False
        kept, said = self._kept if request.copy == "kept" else None, b""
        if kept is None:
            parent, (ours, theirs) = os.getpid(), Pipe()
            if not (copy := os.fork()):
                ours.close()
                _end_with(parent)
                self._pid, self._original, self._kept = os.getpid(), theirs, None
                _leave_exit_to_original()
                return False
            theirs.close()
        else:
            copy, ours = kept
        with suppress(EOFError, ConnectionError):
            if kept is not None:
                ours.send_bytes(request.to_json())
            while not ours.poll(_POLL_SECONDS):  # A process that it has forked keeps its end open when it dies.
                if os.waitid(os.P_PID, copy, os.WEXITED | os.WNOHANG | os.WNOWAIT) and not ours.poll():
                    raise EOFError
            said = ours.recv_bytes()
        if request.copy == "kept":
            self._kept = (copy, ours) if said == _STAYS else None
        code = 0 if said == _STAYS else os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        if not said:
            faulthandler.disable()  # The copy's has told.
            os.kill(os.getpid(), max(-code, 0))
            os._exit(code)
        return True

    def end_copy(self, *, stays: bool) -> None:
        """Tell the process that this is a copy of, if it is one, that it has replied; end it, unless it `stays`."""
        if self._original is not None:
            self._original.send_bytes(_STAYS if stays else _ENDS)
            if not stays:
                self.close()

    def close(self) -> None:
        """End the copy that is kept, or this process, if it is one."""
        if self._kept is not None:
            self._kept[1].close()
            os.waitpid(self._kept[0], 0)
        if self._original is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LEAVE_SECONDS)  # What it has started may not end.
            atexit._run_exitfuncs()
            _leave()

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
        if connection.passes_on(request):
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
        connection.end_copy(stays=request.copy == "kept" and handler is not None and not handler.is_spoilt)
    connection.close()


def can_be_copied() -> bool:
    """Return whether a copy would miss no thread: it might wait for one forever, as for OpenMP's (GNU's libgomp).

    Those of OpenBLAS end before a fork, and jemalloc, which pyarrow has, does without its own after one. A workload
    that ignores or handles the end of its children takes their exit statuses from here.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
        return False
    if not (copy := os.fork()):
        os._exit(0)
    os.waitpid(copy, 0)
    threads = (thread.joinpath("comm").read_text().strip() for thread in Path("/proc/self/task").iterdir())
    return sum(name != "jemalloc_bg_thd" for name in threads) == 1


def _leave_exit_to_original() -> None:
    """Forget the processes and the functions for an exit that a copy has from its original, as multiprocessing does.

    Otherwise it would remove temporary folders of the original, say (`weakref.finalize`).
    """
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    process._children.clear()  # type: ignore[attr-defined]
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    util._run_after_forkers()  # type: ignore[attr-defined]


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
