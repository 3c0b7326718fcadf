"""Requests to a child and their replies, which cross a private connection as JSON; and the child's side of it.

To add a job: a subclass of `Request`, typed with its reply, and a method for it in the class that handles requests.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args

from autoaccum.devices.child.failures import Failure, describe_failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.serialization import read_record

Reply = TypeVar("Reply")
_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"


class Request(Generic[Reply]):
    """A job for a child; a subclass is a frozen dataclass, and its type argument the type of the reply."""

    @property
    def doing(self) -> str:
        """The job as the subject of a message, such as `loading model.py`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Prepare(Request[None]):
    """Import what every workload needs, before there is one; the only request without a reply.

    Attributes:
        handler: The class that handles all later requests, as `package.module:Name`.
        paths: Where its modules are.
        measured: Whether the child measures its own memory.
    """

    handler: str
    paths: ImportPaths
    measured: bool


@dataclass(frozen=True)
class Ready(Request[None]):
    """Reply once the child has started."""

    doing = "starting"


def to_json(message: Any) -> bytes:
    """Encode a request or a reply; records become objects with their fields."""
    return json.dumps(
        message, default=lambda record: dict(record) if isinstance(record, Mapping) else vars(record)
    ).encode()


def request_message(request: Request[Any]) -> dict[str, Any]:
    """Return the message that `read_request` reads."""
    kind = type(request)
    return {"request": f"{kind.__module__}:{kind.__qualname__}", "fields": vars(request)}


def read_request(message: Mapping[str, Any]) -> Request[Any]:
    """Return the request in a message; its class is imported here."""
    request: Request[Any] = read_record(message["fields"], find_class(message["request"]))
    return request


def find_class(name: str) -> Any:
    """Import the class that is called `package.module:Name`."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)


def read_reply(message: Mapping[str, Any], request: Request[Reply]) -> Reply:
    """Return the reply to `request` in a message."""
    base: Any = getattr(type(request), "__orig_bases__")[0]  # noqa: B009
    (kind,) = get_args(base)
    return cast("Reply", read_record(message["reply"], kind))


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
        if os.getpid() != self._pid:  # A copy that the workload made by os.fork: only the original answers.
            os._exit(0)
        _flush()
        try:
            self._connection.send_bytes(to_json({"failure" if isinstance(reply, Failure) else "reply": reply}))
        except ConnectionError:  # The parent has been ended, and nobody waits for the answer.
            os._exit(1)


def serve(connection: ParentConnection, handle: Callable[[Request[Any]], Any]) -> None:
    """Reply to requests until the parent closes its end, by what `handle` returns, or by a `Failure` if it raises."""
    while (message := connection.read()) is not None:
        request = read_request(message)
        try:
            reply = handle(request)
        except BaseException as error:
            reply = describe_failure(error, request.doing)
        connection.reply(reply)


def _leave() -> None:
    """Exit without tearing down every module, which saves a second per process."""
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # The workload may have closed or replaced it.
            stream.flush()
