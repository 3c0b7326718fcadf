"""Traces of a workload by a child process that simulates a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autoaccum.devices.base import Inspection, TrialSettings
from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.trace import Trace
from autoaccum.devices.worker import Worker


class ChildTracer:
    """One child that has loaded the workload in the presence of `card`.

    Args:
        settings: What all traces have in common.
        card: The card.
        on_output: Gets each line the workload prints; None: it goes to stderr.

    Raises:
        WorkloadError: The workload cannot be loaded, or not be simulated.
        NotMeasuredError: The process cannot be started, died or took too long.
    """

    def __init__(self, settings: TrialSettings, card: Card, on_output: Callable[[str], None] | None = None) -> None:
        self._worker = Worker(
            settings, f"the simulated {card.name}", card=dataclasses.asdict(card), on_output=on_output
        )

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        """As `Device.inspect`; the loss and its weighting are not checked.

        Raises:
            WorkloadError: The workload is not usable, or cannot be simulated.
            NotMeasuredError: The process died or took too long.
        """
        return self._worker.inspect(limit_seconds)

    def trace(self, parts: tuple[int, ...], *, limit_seconds: float | None = None) -> Trace:
        """One rehearsal of `parts`.

        Raises:
            WorkloadError, NotMeasuredError: As `inspect`.
        """
        return Trace.from_record(self._worker.trace(parts, limit_seconds))

    def close(self) -> None:
        """End the process."""
        self._worker.end()
