"""Requests to a child that simulates a card, and the process that answers them; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Final

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.process import ChildProcess
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.explanation import Change
from autoaccum.devices.trial_requests import LoadWorkload, PartsRequest
from autoaccum.messages import Message
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import LabelledTrace, Trace, UpdateCost

CHECKPOINT: Final = "checkpoint"
"""The name of the change that runs blocks again in backward."""


@dataclass(frozen=True, kw_only=True)
class LoadOnCard(LoadWorkload):
    """Load the workload in the presence of a simulated card; `others` may share its traces."""

    card: Card
    others: tuple[Card, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UseCard(Request[bool]):
    """Simulate another card from now on; False if code of this process has asked for the card, and may remember it."""

    card: Card
    others: tuple[Card, ...] = ()

    doing = "changing the card"


@dataclass(frozen=True)
class ListAlike(Request[tuple[str, ...]]):
    """Name the other cards that have answered alike whatever was asked of the card so far."""

    doing = "comparing cards"


@dataclass(frozen=True, kw_only=True)
class TraceParts(PartsRequest[Trace]):
    """Trace a trial of `parts`; with the suggested change of that name, if one is given."""

    change: str = ""

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return super().doing + (f" with {self.change}" if self.change else "")


class CountCost(PartsRequest[UpdateCost]):
    """Count what an update by `parts` costs, of two sizes best."""


class LabelParts(PartsRequest[LabelledTrace]):
    """Trace a trial of `parts`, and label each block with its purpose."""


@dataclass(frozen=True)
class SuggestChanges(Request[tuple[Change, ...]]):
    """Suggest changes by which the workload takes another amount of memory."""

    doing = "looking for changes"


def start_tracing(settings: TrialSettings, card_name: str) -> ChildProcess:
    """Start the process of a `Tracer`, which imports PyTorch first."""
    return ChildProcess(
        "autoaccum.devices.simulated.simulated_child:SimulatedChild",
        on_output=settings.on_output,
        measured=False,
        paths=settings.paths,
        owner=f"the simulated {card_name}",
    )


class Tracer:
    """A child that has loaded the workload in the presence of `card`, and traces its trials there, as for `others`.

    `process` is one that `start_tracing` has started; None: it starts its own. `findings` are as of `Device`.

    Raises:
        WorkloadError: The workload cannot be loaded, or not be simulated; every call may raise it, too.
        NotMeasuredError: The process cannot be started, died or took too long; every call may raise it, too.
    """

    findings: tuple[Message, ...] = ()

    def __init__(
        self, settings: TrialSettings, card: Card, others: tuple[Card, ...] = (), process: ChildProcess | None = None
    ) -> None:
        self._settings = settings
        self._process = process or start_tracing(settings, card.name)
        import_module("autoaccum.simulation.allocator.replay")  # While the process imports PyTorch.
        load = LoadOnCard(card=card, others=others, **settings.to_request())
        self._process.run(load, settings.load_seconds)

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Run a job and return its reply, in `limit_seconds` if that is less than the settings' limit on trials."""
        return self._process.run(request, self._settings.job_seconds(limit_seconds))

    def close(self) -> None:
        """End the process."""
        self._process.close()
