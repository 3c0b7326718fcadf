"""A child process that outlives its workload: the next one is loaded into it, so that PyTorch is imported once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoaccum.devices.process import ChildProcess, start_child


class KeptChild:
    """Stands in for what `devices.process.start_child` returns; what it answers comes from a real child.

    For what is told before any trial: trials ask for processes of their own.
    """

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def start(self, on_output: Callable[[str], None] | None = None, **options: Any) -> KeptChild:
        """As `start_child`, of one for the CPU."""
        assert not options.get("simulated")
        if self._process is None or self._process.has_died():
            self._process = start_child(on_output)
        return self

    @property
    def _child(self) -> ChildProcess:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    def ask(
        self, request: Mapping[str, Any], limit_seconds: float, is_stopped: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        return self._child.ask(request, limit_seconds, is_stopped)

    def end(self, *, grace_seconds: float = 0.0) -> None:
        """Keep it."""

    def close(self) -> None:
        """Really end it."""
        if self._process is not None:
            self._process.end()
