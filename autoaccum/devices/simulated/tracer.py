"""Who traces a workload on a card that is not there: without torch, which the tracer's own process has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from autoaccum.devices.base import Inspection
from autoaccum.devices.simulated.labels import LabelledTrace
from autoaccum.devices.simulated.trace import Trace

CHECKPOINT: Final = "checkpoint"
"""The name of the offer to run blocks again in backward."""
CHUNKED: Final = "chunked loss"
"""The name of the offer to make logits of some rows at a time: a change only where much is saved so."""


class ChangeFailed(Exception):
    """A workload that was changed does not run, or cannot be traced; the text says why. The tracer goes on."""


@dataclass(frozen=True)
class Offer:
    """A change that can be simulated (see `devices.explanation.Change`)."""

    name: str
    what: str


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

    def changes(self, *, limit_seconds: float | None = None) -> tuple[Offer, ...]:
        """What could be changed.

        Args:
            limit_seconds: As in `inspect`.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: As in `inspect`.
        """

    def changed(self, parts: tuple[int, ...], change: str, *, limit_seconds: float | None = None) -> Trace:
        """As `trace`, of the workload with one thing changed.

        Args:
            parts: As in `trace`.
            change: The name of an offer.
            limit_seconds: As in `inspect`.

        Raises:
            ChangeFailed: It does not run so.
            NotMeasuredError: As in `inspect`.
        """

    def labelled(self, parts: tuple[int, ...], *, limit_seconds: float | None = None) -> LabelledTrace:
        """The trace of `parts`, with what its blocks are for.

        Args:
            parts: As in `trace`.
            limit_seconds: As in `inspect`.

        Raises:
            WorkloadError, UsageError, NotMeasuredError: As in `inspect`.
        """

    def close(self) -> None:
        """End its process. Idempotent; another question would start a new one."""
