"""What is guarded, and what was measured of it: pure records, which the lock file keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoaccum.devices.explanation import Category, Holding, Moment


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one card or device, as it was asked for; what was not asked for is the workload's own.

    Attributes:
        workload: `model.py`, `model.py:name`, relative to the folder of the lock, with `/`; or `package.module:name`.
        gpu: The card that is simulated; None: `device` measures.
        device: `cpu`, `cuda` or `cuda:N`; None where a card is simulated.
        target_batch: Samples per update, over all ranks; None: two micro-batches of `micro_batch`.
        micro_batch: The largest part, in samples, where it is not to be planned.
        precision, optimizer, memory, reserve, world_size, equal, keeps, evaluation_batch, worst_of, batchnorm: As the
            arguments of `plan`; sizes as they are written, such as `20GiB`.
    """

    workload: str
    gpu: str | None = None
    device: str | None = None
    target_batch: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    memory: str | None = None
    reserve: str | None = None
    world_size: int = 1
    equal: bool = False
    keeps: tuple[str, ...] | None = None
    evaluation_batch: int | None = None
    worst_of: int | None = None
    batchnorm: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What an update takes by one schedule, and what would fit: everything that an outcome rests on.

    Attributes:
        kind: `predicted` by a simulation, or `measured` by runs in fresh processes.
        card: What it is of: the card's full name, or the processor's.
        precision, optimizer, batchnorm: What the update is made with, as an inspection tells.
        parameters: How many the model has.
        micro_batches: The schedule that was measured, in samples.
        fits: Whether it runs within `limit_bytes`.
        largest: The largest micro-batch that fits, in samples; 0: none.
        capped: `largest` is where the search was told to stop, not where memory ended.
        limit_bytes: The budget.
        peak_bytes: As `Plan.peak_bytes`; the median of `runs` where there are several.
        held_bytes: The most that tensors and workspaces hold at one time; None when measured.
        least_bytes: As `Plan.least_bytes`; None when measured.
        runs: Peaks of runs in fresh processes, in bytes, ascending; empty when predicted.
        phase, op, module: The moment at which most is held, as in `Explanation`; empty when measured.
        categories: What is held then, and `unused`, the rest of the peak; empty when measured.
        holdings: The same by module, complete: they add up to `held_bytes`. Empty when measured.
        moments: The same for each phase of the update, in order. Empty when measured.
        versions: Of what decides about the figures: torch, autoaccum; on a card also cuda, cudnn, driver.
        settings: What else does, where it is not as it comes: variables of the allocator and their values.
    """

    kind: Literal["predicted", "measured"]
    card: str
    precision: str
    optimizer: str
    batchnorm: str
    parameters: int
    micro_batches: tuple[int, ...]
    fits: bool
    largest: int
    capped: bool
    limit_bytes: int
    peak_bytes: int
    held_bytes: int | None = None
    least_bytes: int | None = None
    runs: tuple[int, ...] = ()
    phase: str = ""
    op: str = ""
    module: str = ""
    categories: Mapping[Category, int] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    moments: tuple[Moment, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""
        return max(self.micro_batches)

    @property
    def spread_bytes(self) -> int:
        """How far apart the runs are; 0 when predicted."""
        return self.runs[-1] - self.runs[0] if self.runs else 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measurement, and what was said on the way, which is not locked."""

    measurement: Measurement
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
