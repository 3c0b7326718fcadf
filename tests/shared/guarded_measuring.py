"""Measurements of many workloads by one process: the device that a guard asks, with its child in this process."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from autoaccum.devices.base import Inspection, TrialSettings
from autoaccum.devices.simulated.catalog import Card, find_card
from autoaccum.devices.simulated.device import SimulatedDevice
from autoaccum.devices.simulated.jobs import SimulatedChild
from autoaccum.devices.simulated.trace import LabelledTrace, Trace
from autoaccum.devices.simulated.traces import Offer
from autoaccum.devices.torch_release import read_torch_release
from autoaccum.errors import WorkloadError
from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.locks.lock_entries import from_record, to_record
from autoaccum.guarding.measuring.measuring import request_of
from autoaccum.guarding.measuring.simulated_measuring import measure_simulated
from autoaccum.guarding.measuring.sizing import Task
from autoaccum.guarding.records import Case, Measured, Measurement
from autoaccum.planning.subjects import Subject
from autoaccum.units import parse_size


class TracerHere:
    """A child that is none: it simulates in this process, until it is closed."""

    def __init__(self, settings: TrialSettings, card: Card) -> None:
        self._settings, self._child = settings, SimulatedChild()
        where = {"cwd": os.getcwd(), "sys_path": list(sys.path), "pythonpath": os.environ.get("PYTHONPATH")}  # noqa: PTH109
        self._ask("load", card=dataclasses.asdict(card), **where)

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        return Inspection(**self._ask("inspect")["inspection"])

    def trace(self, parts: tuple[int, ...], *, limit_seconds: float | None = None) -> Trace:
        return Trace.from_record(self._ask("trace", parts=parts)["trace"])

    def labelled(self, parts: tuple[int, ...], *, limit_seconds: float | None = None) -> LabelledTrace:
        return LabelledTrace.from_record(self._ask("labelled", parts=parts)["labelled"])

    def changes(self, *, limit_seconds: float | None = None) -> tuple[Offer, ...]:
        raise NotImplementedError

    def changed(self, parts: tuple[int, ...], change: str, *, limit_seconds: float | None = None) -> Trace:
        raise NotImplementedError

    def close(self) -> None:
        self._child.close()

    def _ask(self, job: str, **asked: Any) -> dict[str, Any]:
        request = {**self._settings.to_request(), "optimizer": None, "job": job, **asked}
        reply: dict[str, Any] = json.loads(json.dumps(self._child.answer(request)))
        if "failure" in reply:
            raise WorkloadError(f"{job}: {reply['failure']['message']}\n{reply['failure'].get('traceback')}")
        return reply


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
