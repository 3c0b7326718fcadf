"""A workload on the card and on the simulated one: peaks, and the least memory in which it still runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import predict_trial
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.errors import NotMeasuredError
from autoaccum.simulation.allocator.caching_allocator import read_settings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import Card
from autoaccum.sources.source import FileSource
from autoaccum.units import MIB
from tests.gpu.compared import WORKLOADS

GRAIN_BYTES = 2 * MIB
TOLERANCE = 0.01
MOST_TRIALS = 10


@dataclass(frozen=True)
class Case:
    """A workload of `compared.py` at one micro-batch size.

    Attributes:
        name: The name of the workload.
        size: Samples in each of the two micro-batches.
        least: Whether to search for its least memory, too.
    """

    name: str
    size: int
    least: bool = True

    @property
    def title(self) -> str:
        """The title of its row, such as `gpt_bf16_foreach 24`."""
        return f"{self.name} {self.size}"

    @property
    def settings(self) -> TrialSettings:
        """The settings of a device for its trials."""
        return TrialSettings(
            source=FileSource(f"{Path(__file__).parent / 'compared.py'}:{self.name}"), rank_samples=2 * self.size
        )

    @property
    def parts(self) -> tuple[int, int]:
        """The parts of its trial."""
        return self.size, self.size


CASES = tuple(Case(name, size, size == sizes[-1]) for name, (_, sizes) in WORKLOADS.items() for size in sizes)
"""Only the last size of each searches for the least memory, which takes most of the time."""


def predict(case: Case, card: Card) -> dict[str, Any]:
    """Predict the memory of a case on `card`, from the trace that plans use."""
    tracer = Tracer(case.settings, card)
    try:
        trace = tracer.call(TraceParts(parts=case.parts))
    finally:
        tracer.close()
    began = time.perf_counter()
    replayer = Replayer(card, read_settings(os.environ, card.total_bytes), read_torch_release())
    trial, sized = predict_trial(replayer, [trace], card.total_bytes), replayer.with_sizes(trace)
    return {
        "peak_allocated_bytes": trial.peak_allocated_bytes,
        "peak_reserved_bytes": trial.peak_reserved_bytes,
        "min_budget_bytes": replayer.min_budget_bytes([trace], card.total_bytes) if trial.ran else None,
        "uncertainty_bytes": sized.uncertainty_bytes,
        "guessed": list(sized.guessed),
        "events": len(trace.events),
        "seconds": time.perf_counter() - began,
    }


def measure(case: Case, device: Device, predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the case on `device`, the card with its workload; the search for the least begins at what is predicted.

    Raises:
        NotMeasuredError: It did not run.
    """

    def runs(limit_bytes: int) -> bool:
        vars(device)["_limit_bytes"] = limit_bytes
        trial = device.trial(case.parts)
        if trial.outcome == "error":
            raise NotMeasuredError(f"with {limit_bytes:,} bytes: {trial.message}")
        return trial.ran

    trial = device.trial(case.parts)
    if not trial.ran or trial.peak_reserved_bytes is None:
        raise NotMeasuredError(f"{trial.outcome} in {trial.phase}: {trial.message}")
    row = {
        "peak_allocated_bytes": trial.peak_allocated_bytes,
        "peak_reserved_bytes": trial.peak_reserved_bytes,
        "allocator_retries": trial.allocator_retries,
        "seconds": trial.seconds,
    }
    if not case.least or predicted["min_budget_bytes"] is None:
        return row
    return {**row, "least": find_least(runs, predicted["min_budget_bytes"], trial.peak_reserved_bytes)}


def find_least(runs: Callable[[int], bool], guess_bytes: int, most_bytes: int) -> dict[str, int]:
    """Close in on the least limit at which `runs` says yes, to 1 % of it; return the two limits, and the trials made.

    It begins on both sides of a guess, since a refusal costs a process: a guess that is right takes two trials. From
    one that is not, steps double, and what they enclose is halved. Limits are multiples of 2 MiB.
    """
    step = max(GRAIN_BYTES, _round_down(int(guess_bytes * TOLERANCE)))
    ran, failed, trials = -(-most_bytes // GRAIN_BYTES) * GRAIN_BYTES, 0, 0
    limit, stride = min(_round_down(guess_bytes + step // 2), ran - step), step
    while ran - failed > step and trials < MOST_TRIALS:
        if not failed < limit < ran:
            limit = _round_down((ran + failed) // 2)
        trials += 1
        if runs(limit):
            ran, limit = limit, limit - stride
        else:
            failed, limit = limit, limit + stride
        stride *= 2
    return {"ran_bytes": ran, "failed_bytes": failed, "trials": trials}


def _round_down(size: int) -> int:
    return size // GRAIN_BYTES * GRAIN_BYTES
