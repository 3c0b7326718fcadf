"""Requests to a child that loads a workload, inspects it and runs trials of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoaccum.devices.base import Inspection
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.trial_record import TrialMeasurement


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The facts that a budget is chosen by (`Meter.begin`), or the reason why the device cannot be used."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadWorkload(Request[Loaded]):
    """Load the workload, and make the device ready; the fields are those of `TrialSettings`."""

    device: str
    paths: ImportPaths
    reference: str
    share: int
    options: Mapping[str, Any]
    pickled: str | None = None

    doing = "loading the workload"


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """An inspection, and the bytes that it did not free."""

    inspection: Inspection
    leftover_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Inspect(Request[Inspected]):
    """Check the workload by an update from a small batch."""

    doing = "building the model and checking an update of it"


@dataclass(frozen=True, kw_only=True)
class PartsRequest(Request[Reply]):
    """A job that is an update by `parts[:1]` and one by all `parts`: micro-batch sizes, in samples."""

    parts: tuple[int, ...]

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"micro-batch {max(self.parts)}"


@dataclass(frozen=True, kw_only=True)
class RunTrial(PartsRequest[TrialMeasurement]):
    """Run a trial of `parts` under a limit on memory."""

    limit_bytes: int
