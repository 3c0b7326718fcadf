"""`python -m autoaccum.devices.child CONNECTION PARENT`: runs the jobs that its parent requests.

The first request says which class handles all others. Requests and replies have a connection of their own: standard
output belongs to the workload.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import Any

from autoaccum.devices.child.requests import ParentConnection, Prepare, Ready, Request, find_class, read_request, serve


def main(arguments: list[str]) -> None:
    """Handle requests until the parent closes its end."""
    connection = ParentConnection(arguments)
    message = connection.read()
    if message is None:
        return
    first = read_request(message)
    assert isinstance(first, Prepare)
    _prepare(first)
    handler: Any = None

    def handle(request: Request[Any]) -> Any:
        nonlocal handler
        if isinstance(request, Ready):
            return None
        handler = handler or find_class(first.handler)()
        return handler.handle(request)

    serve(connection, handle)


def _prepare(request: Prepare) -> None:
    """Import what the handler needs; what goes wrong here goes wrong again when the workload is loaded.

    To look for garbage takes a fifth of the time; where no memory is measured, it is never looked for in what is
    imported here.
    """
    request.paths.use()
    gc.disable()
    with suppress(Exception):
        find_class(request.handler).prepare()
    if not request.measured:
        gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main(sys.argv[1:])
