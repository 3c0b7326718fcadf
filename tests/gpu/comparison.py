"""A workload on the card and on the simulated one: peaks, and the least memory in which it still runs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.device_choice import read_torch_release
from autoaccum.devices.simulated.simulated_device import predict_trial
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.errors import NotMeasuredError
from autoaccum.simulation.allocator.caching_allocator import read_settings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import Card
from autoaccum.simulation.trace_records import Trace
from autoaccum.units import MIB
from tests.gpu.cases import Case

GRAIN_BYTES = 2 * MIB
TOLERANCE = 0.01
MOST_TRIALS = 10


@dataclasses.dataclass(frozen=True)
class Least:
    """The least memory in which a case still runs, between two limits, and the number of trials that found it."""

    ran_bytes: int
    failed_bytes: int
    trials: int


def trace_case(case: Case, card: Card) -> Trace:
    """The trace of the case's parts on `card`, by the tracer that plans use."""
    tracer = Tracer(TrialSettings(reference=case.reference, share=sum(case.parts)), card)
    try:
        return tracer.call(TraceParts(parts=case.parts))
    finally:
        tracer.close()


def predict(trace: Trace, card: Card) -> dict[str, Any]:
    """Predict the memory of a trace."""
    began = time.perf_counter()
    replayer = Replayer(card, read_settings(os.environ, card.total_bytes), read_torch_release())
    trial, sized = predict_trial(replayer, [trace], card.total_bytes), replayer.with_sizes(trace)
    return {
        "peak_allocated_bytes": trial.peak_allocated_bytes,
        "peak_reserved_bytes": trial.peak_reserved_bytes,
        "least_bytes": replayer.least_bytes([trace], card.total_bytes) if trial.ran else None,
        "band_bytes": sized.band_bytes,
        "guessed": list(sized.guessed),
        "events": len(trace.events),
        "seconds": time.perf_counter() - began,
    }


def measure(case: Case, device: Device, predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the case on the card.

    Args:
        case: The case.
        device: The card, with the case's workload.
        predicted: By `predict`: where the search for the least memory begins.

    Raises:
        NotMeasuredError: It did not run.
    """
    trial = device.trial(case.parts)
    if not trial.ran or trial.peak_reserved_bytes is None:
        raise NotMeasuredError(f"{trial.outcome} in {trial.phase}: {trial.message}")
    row = {
        "peak_allocated_bytes": trial.peak_allocated_bytes,
        "peak_reserved_bytes": trial.peak_reserved_bytes,
        "allocator_retries": trial.allocator_retries,
        "seconds": trial.seconds,
    }
    if not case.least or predicted["least_bytes"] is None:
        return row
    return {**row, "least": _measure_least(case, device, predicted["least_bytes"], trial.peak_reserved_bytes)}


def _measure_least(case: Case, device: Device, guess_bytes: int, most_bytes: int) -> Mapping[str, Any]:
    def runs(limit_bytes: int) -> bool:
        trial = device.trial(case.parts, limit_bytes=limit_bytes)
        if trial.outcome == "error":
            raise NotMeasuredError(f"with {limit_bytes:,} bytes: {trial.message}")
        return trial.ran

    return dataclasses.asdict(find_least(runs, guess_bytes, most_bytes))


def find_least(runs: Callable[[int], bool], guess_bytes: int, most_bytes: int) -> Least:
    """Close in on the least limit at which `runs` says yes, to 1 % of it.

    It begins on both sides of a guess, since a refusal costs a process: a guess that is right takes two trials. From
    one that is not, steps double. Limits are multiples of 2 MiB.

    Args:
        runs: Whether it runs within a limit in bytes.
        guess_bytes: What is predicted.
        most_bytes: Within which it ran.
    """
    step = max(GRAIN_BYTES, _round_down(int(guess_bytes * TOLERANCE)))
    ran, failed, trials = -(-most_bytes // GRAIN_BYTES) * GRAIN_BYTES, 0, 0

    def ask(limit: int) -> None:
        nonlocal ran, failed, trials
        trials += 1
        if runs(limit):
            ran = limit
        else:
            failed = limit

    start, stride = _round_down(guess_bytes + step // 2), step
    if start < ran:
        ask(start)
    while failed and ran - failed > step and failed + stride < ran and trials < MOST_TRIALS:  # Upwards.
        before = failed
        ask(failed + stride)
        if failed == before:
            break
        stride *= 2
    while not failed and trials < MOST_TRIALS:  # Downwards; nothing runs in nothing.
        below = ran - stride
        if below <= 0:
            break
        ask(below)
        stride *= 2
    while ran - failed > step and trials < MOST_TRIALS:
        middle = _round_down((ran + failed) // 2)
        if middle in (ran, failed):
            break
        ask(middle)
    return Least(ran, failed, trials)


def _round_down(size: int) -> int:
    return size // GRAIN_BYTES * GRAIN_BYTES
