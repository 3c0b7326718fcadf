"""Requests to a child that loads a workload, inspects it and runs its trials; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from autoaccum.devices.base import Inspection, Trial
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.options import GradSync
from autoaccum.sources.source import read_source

if TYPE_CHECKING:
    from autoaccum.sources.workload import Workload


@dataclass(frozen=True, kw_only=True)
class LoadWorkload(Request[Mapping[str, Any]]):
    """Load the workload, and make the device ready; the reply is what a budget is chosen by (`Meter.begin`).

    The fields are those of `TrialSettings`. A process that is `to_copy` computes nothing if it can be copied:
    its copies make the device ready. The reply says whether it `is_copied`.
    """

    device: str = "cpu"
    to_copy: bool = False
    source: Mapping[str, Any]
    rank_samples: int
    options: Mapping[str, Any]

    may_be_refused = True

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"loading {read_source(self.source).name}"


@dataclass(frozen=True, kw_only=True)
class _WithSavers:
    """What is done with `savers` in place of the workload's, if they are given."""

    savers: tuple[str, ...] | None = None
    copy: Literal["new", "kept"] | None = None

    def replaced(self, workload: Workload) -> Workload:
        """Return the workload with these savers in place of its own."""
        return workload if self.savers is None else replace(workload, savers=self.savers)


@dataclass(frozen=True, kw_only=True)
class Inspect(Request[Inspection], _WithSavers):
    """Check the workload by an update from a small batch."""

    doing = "an update from a small batch"


@dataclass(frozen=True, kw_only=True)
class PartsRequest(Request[Reply], _WithSavers):
    """A job that is an update, and another one by `parts`: micro-batch sizes, in samples.

    `lengths`: the length of the samples of each part, in tokens; empty: the longest. `needs_whole_batch`: the parts
    need each other, and every update runs all of them. `grad_sync`: when FSDP2 sums gradients; None: as the Accumulator
    does by default.
    """

    parts: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    needs_whole_batch: bool = False
    grad_sync: GradSync | None = None

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        of = f" of samples of {max(self.lengths)} tokens at most" if self.lengths else ""
        return f"micro-batch {max(self.parts)}{of}"


@dataclass(frozen=True, kw_only=True)
class RunTrial(PartsRequest[Trial]):
    """Run a trial of `parts` under a limit on memory."""

    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class TimeUpdate(Request[float]):
    """Make an update; the reply is how many seconds it took."""

    micro_batch: int

    @property
    def doing(self) -> str:
        """As `Request.doing`."""
        return f"an update in micro-batches of {self.micro_batch}"
