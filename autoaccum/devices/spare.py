"""A child started ahead of need: it imports what every child imports, and waits for a workload to load.

Importing PyTorch, and what its first optimizer imports, is most of what a new process costs. The spare does it while
a trial runs. It has loaded no workload and touched no card, so that it takes nothing but its imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from autoaccum.devices.checkout import Checkout
from autoaccum.devices.process import ChildProcess, child_environment
from autoaccum.units import MIB

_MODULE = "autoaccum.devices.child"

SPARE_BYTES = 512 * MIB
"""Host memory that has to be free beyond the budget before a spare is kept: it takes about 230 MiB (torch 2.13), and
as much again should stay free."""


def start_child(
    on_output: Callable[[str], None] | None = None, *, simulated: bool = False, checkout: Checkout | None = None
) -> ChildProcess:
    """Start a child of `devices.child` and have it import what all of them need; does not wait for that.

    Args:
        on_output: Gets each line it prints; None: it goes to stderr.
        simulated: It is to simulate a card, which needs more of PyTorch.
        checkout: Where its modules lie; None: where this process finds them.

    Raises:
        UsageError: This process is such a child itself.
        NotMeasuredError: It cannot be started.
    """
    process = ChildProcess(_MODULE, on_output=on_output, measured=not simulated)
    process.tell({"job": "prepare", "simulated": simulated, **where_to_import(checkout)})
    return process


def where_to_import(checkout: Checkout | None = None) -> Mapping[str, Any]:
    """Where modules are found in this process, or in a checkout instead, as a child is told."""
    pythonpath = os.environ.get("PYTHONPATH")
    if checkout is None:
        return {"cwd": os.getcwd(), "sys_path": sys.path, "pythonpath": pythonpath}  # noqa: PTH109
    return {
        "cwd": str(checkout.folder),
        "sys_path": [checkout.map_entry(entry) for entry in sys.path],
        "pythonpath": None if pythonpath is None else checkout.map_path(pythonpath),
        "checkout": checkout.to_record(),
    }


class SpareChild:
    """One child that nobody has asked anything yet; whoever takes it has to end it.

    Args:
        on_output: Gets each line it prints; None: it goes to stderr.
        checkout: As in `start_child`.
        start: Starts it, given `on_output`; None: `start_child` does.

    Raises:
        UsageError, NotMeasuredError: As `start_child`.
    """

    def __init__(
        self,
        on_output: Callable[[str], None] | None = None,
        checkout: Checkout | None = None,
        *,
        start: Callable[[Callable[[str], None] | None], ChildProcess] | None = None,
    ) -> None:
        self._started_in = _surroundings()
        self._process = start_child(on_output, checkout=checkout) if start is None else start(on_output)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def take(self) -> ChildProcess | None:
        """The process, or None if it has died meanwhile or was started in other surroundings than now."""
        if self._process.has_died() or self._started_in != _surroundings():
            self.end()
            return None
        return self._process

    def end(self) -> None:
        """End it at once: it holds nothing that anybody would miss."""
        self._process.end()


def _surroundings() -> tuple[object, ...]:
    """What a child inherits or is told when it starts."""
    return child_environment(), list(sys.path), sys.executable
