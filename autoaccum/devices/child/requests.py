"""Requests to a child process and its replies: frozen records, which cross the connection as JSON.

To add a job: a subclass of `Request`, typed with its reply, and a method for it in the class that handles requests.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, get_args

from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.serialization import read_record

Reply = TypeVar("Reply")


class Request(Generic[Reply]):
    """A job for a child; a subclass is a frozen dataclass, and its type argument the type of the reply."""

    @property
    def doing(self) -> str:
        """The job as the subject of a message, such as `loading the workload`."""
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
