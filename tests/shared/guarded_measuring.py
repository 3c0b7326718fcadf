"""Measurements of many workloads by one process: the device that a guard asks, with its child in this process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

from tracing_here import TracerHere

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.environment import read_torch_release
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.device import SimulatedDevice
from autoaccum.guarding.cases import Case, make_case
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import Task, measure_simulated, request_of
from autoaccum.guarding.records import Measured, Measurement
from autoaccum.planning.subjects import Subject

CASE: Final = make_case(workload="train.py", gpu="rtx3090", micro_batch=32)
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
    reference, request, card = str(folder / case.workload), request_of(case), find_card(str(case.options.gpu))
    settings = TrialSettings(reference=reference, share=request.share)
    tracer = partial(TracerHere, settings, card)
    memory = case.options.memory
    if case.micro_batch is not None:
        micro_batches = micro_batches or request.schedule(request.cap).micro_batches
    with SimulatedDevice(
        card, tracer, share=request.share, torch_version=read_torch_release(), memory=memory
    ) as device:
        return measure_simulated(Task(Subject(device, reference), request, micro_batches))


def as_locked(measurement: Measurement) -> Measurement:
    """What a lock keeps of a measurement of `CASE`."""
    with TemporaryDirectory() as folder:
        write_lock(Path(folder) / "autoaccum.lock", {CASE: measurement})
        return read_lock(Path(folder) / "autoaccum.lock", "")[CASE]
