"""Requests of a plan from flat arguments, plans on a device that a test made, and the simulated card of most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from small_classifier import layers_file

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import Tracer
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.options import Options, make_options
from autoaccum.planning.plan_events import Event
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource
from autoaccum.spec import SPEC_FIELDS
from autoaccum.units import GIB, MemorySize

CARD = find_card("rtx3090")
LINEAR_FILE = f"import os, signal, time{layers_file(64, 64, 64)}"


_OPTIONS = {*SPEC_FIELDS, *(field.name for field in dataclasses.fields(Options))}


def make_request(target: int, **asked: Any) -> PlanRequest:
    options = make_options(**{name: value for name, value in asked.items() if name in _OPTIONS})
    return PlanRequest(target, options, **{name: value for name, value in asked.items() if name not in _OPTIONS})


def make_settings(reference: str, rank_samples: int, memory_bytes: int | None = None, **options: Any) -> TrialSettings:
    memory = None if memory_bytes is None else MemorySize(bytes=memory_bytes)
    return TrialSettings(
        source=FileSource(reference), rank_samples=rank_samples, options=make_options(memory=memory, **options)
    )


def make_plan_setup(device: Device, name: str = "model.py") -> PlanSetup:
    return PlanSetup(device, make_settings(name, 256))


def plan_on(
    device: Device, target: int = 256, *, on_event: Callable[[Event], None] | None = None, **asked: Any
) -> Plan:
    """Return the plan of a request, as of `make_request`, on a device; closes it."""
    with device:
        return plan_on_device(make_plan_setup(device), make_request(target, **asked), on_event=on_event)


def simulated_card(
    tracer: Tracer,
    rank_samples: int,
    memory_bytes: int = 2 * GIB,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> SimulatedDevice:
    """Return an RTX 3090 with that budget, whose traces `tracer` makes."""
    memory = MemorySize(bytes=memory_bytes)
    traces = TraceCache(lambda: tracer, rank_samples)
    return SimulatedDevice(CARD, traces, torch_version=(2, 13), memory=memory, environment=environment)


def plan_simulated(tracer: Tracer, target: int = 256, memory_bytes: int = 2 * GIB, **asked: Any) -> Plan:
    """Return the plan of a request on `simulated_card`."""
    how = {name: asked.pop(name) for name in ("environment",) if name in asked}
    rank_samples = make_request(
        target, **{name: value for name, value in asked.items() if name != "on_event"}
    ).rank_samples
    return plan_on(simulated_card(tracer, rank_samples, memory_bytes, **how), target, **asked)
