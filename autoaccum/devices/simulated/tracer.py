"""Who traces a workload on a card that is not there: without torch, which the tracer's own process has."""

from __future__ import annotations

from typing import Protocol

from autoaccum.devices.base import Inspection
from autoaccum.devices.simulated.trace import Trace


class Tracer(Protocol):
    """Rehearses one workload on one simulated card, and tells what it asked of the allocator."""

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """Load and check the workload.

        Args:
            limit_seconds: End it after this time, if that is less than the settings' limit on trials.

        Raises:
            WorkloadError: The workload is not usable, or cannot be traced.
            UsageError: It cannot be simulated here.
            NotMeasuredError: Its process died or took too long.
        """

    def trace(self, parts: tuple[int, ...], *, limit_seconds: float | None = None) -> Trace:
        """Rehearse an update by `parts[:1]` and one by all `parts`.

        Args:
            parts: Micro-batch sizes of the second update, in samples.
            limit_seconds: As in `inspect`.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: As in `inspect`.
        """

    def close(self) -> None:
        """End its process. Idempotent; another question would start a new one."""
