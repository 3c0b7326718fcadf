"""Measurements of many workloads by one process: the device that a guard asks, with its child in this process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tracing_here import TracerHere

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.device import SimulatedDevice
from autoaccum.devices.torch_release import read_torch_release
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.locks.lock_entries import from_record, to_record
from autoaccum.guarding.measuring.measuring import request_of
from autoaccum.guarding.measuring.simulated_measuring import measure_simulated
from autoaccum.guarding.measuring.sizing import Task
from autoaccum.guarding.records import Case, Measured, Measurement
from autoaccum.planning.subjects import Subject
from autoaccum.units import parse_size

CASE: Final = Case(workload="train.py", gpu="rtx3090", micro_batch=32)
"""Two micro-batches of 32 samples on a card that has room for far more: nothing is searched for."""


def measure_here(
    source: str,
    folder: Path,
    files: Mapping[str, str] = MappingProxyType({}),
    case: Case = CASE,
    micro_batches: tuple[int, ...] | None = None,
) -> Measured:
    """Measure a workload as a guard does, but for the process.

    Args:
        source: Of the workload.
        folder: An empty one.
        files: Source by name of what lies beside it.
        case: What is asked for, of `train.py`.
        micro_batches: The schedule; None: with a micro-batch the one that is asked for, else the one that is planned.
    """
    for name, text in {case.workload: source, **files}.items():
        (folder / name).write_text(text)
    reference, request, card = str(folder / case.workload), request_of(case), find_card(str(case.gpu))
    settings = TrialSettings(reference=reference, share=request.share)
    tracer = partial(TracerHere, settings, card)
    memory = None if case.memory is None else parse_size(case.memory)
    if case.micro_batch is not None:
        micro_batches = micro_batches or request.schedule(request.cap).micro_batches
    with SimulatedDevice(
        card, tracer, share=request.share, torch_version=read_torch_release(), memory=memory
    ) as device:
        return measure_simulated(Task(Subject(device, reference), request, micro_batches, lambda event: None))


def as_locked(measurement: Measurement) -> Measurement:
    """What a lock keeps of a measurement of `CASE`."""
    return from_record(case_name(CASE), to_record(CASE, measurement))[1]
