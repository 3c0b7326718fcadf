"""A device without memory: trials follow from a formula, as those of processes would."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from autoaccum.accumulation.schedule import part_sizes
from autoaccum.devices.base import Trial
from autoaccum.planning.plan_messages import MemoryNeeds
from autoaccum.planning.search import SearchResult, search
from autoaccum.units import GIB, MIB

LIMIT = 4 * GIB
Kind = Literal["affine", "noise", "floor", "steps", "concave"]


@dataclass
class SyntheticMemory:
    """Micro-batches up to `ceiling` samples fit into LIMIT; `constant` is the share of it that no sample takes.

    Kinds: `noise` of 1 % in every measured peak; a `floor` under every update's peak, whatever its size; `steps` of 2
    to 128 MiB; `concave`, where small micro-batches cost more a sample.
    """

    ceiling: int
    constant: float = 0.3
    kind: Kind = "affine"
    seed: int = 0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} {self.ceiling} {self.constant}")
        self._slope = (1 - self.constant) * LIMIT / (self.ceiling + self._random.uniform(0.01, 0.99))
        self._step = self._random.choice((2, 16, 128)) * MIB
        self._floor = self.constant + (1 - self.constant) * self._random.uniform(0.1, 0.9)
        self._used = True  # The inspection has run.

    def peak(self, size: int) -> int:
        """The peak in bytes of an update."""
        grows = self._slope * size
        if self.kind == "steps":
            grows = math.ceil(grows / self._step) * self._step
        if self.kind == "concave":
            grows = (1 - self.constant) * LIMIT * (size / (self.ceiling + 0.5)) ** 0.85
        peak = self.constant * LIMIT + grows
        return int(max(peak, self._floor * LIMIT if self.kind == "floor" else 0))

    def measured(self, size: int) -> int:
        noise = self._random.uniform(-0.01, 0.01) if self.kind == "noise" else 0.0
        return int(self.peak(size) * (1 + noise))

    def fits(self, size: int) -> bool:
        return self.peak(size) <= LIMIT

    def trial(self, size: int, *, fresh: bool, unlimited: bool) -> Trial:
        """A failure ends the process; the next trial has a fresh one."""
        ran, is_fresh = self.fits(size), fresh or not self._used
        self._used = ran
        peak = min(self.measured(size), LIMIT) if ran else None
        return self._keep(
            Trial(parts=(size, size), outcome="ok" if ran else "oom", peak_reserved_bytes=peak, fresh=is_fresh)
        )

    def needs(self) -> MemoryNeeds:
        """What an inspection tells: the peak of two samples, and a sample's activations without what backward adds."""
        return MemoryNeeds(
            update_bytes=self.peak(2), update_samples=2, sample_bytes=int(self._slope / self._random.uniform(1.05, 1.4))
        )

    def search(self, target: int, *, sizes: Any = None, **options: Any) -> SearchResult:
        """Search the schedules of `target` samples."""
        asked: dict[str, Any] = {"limit_bytes": LIMIT, "needs": self.needs()} | options
        return search(self.trial, part_sizes(target, target) if sizes is None else sizes, **asked)

    def _keep(self, trial: Trial) -> Trial:
        self.trials.append(trial)
        return trial
