"""Requests of a plan, from flat keyword arguments as `autoaccum.plan` takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoaccum.devices.base import TrialSettings
from autoaccum.options import Options, make_options
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.spec import SPEC_FIELDS
from autoaccum.units import MemorySize

_OPTIONS = {*SPEC_FIELDS, *(field.name for field in dataclasses.fields(Options))}


def make_request(target: int, **asked: Any) -> PlanRequest:
    options = make_options(**{name: value for name, value in asked.items() if name in _OPTIONS})
    return PlanRequest(target, options, **{name: value for name, value in asked.items() if name not in _OPTIONS})


def make_settings(reference: str, share: int, memory_bytes: int | None = None, **options: Any) -> TrialSettings:
    memory = None if memory_bytes is None else MemorySize(bytes=memory_bytes)
    return TrialSettings(reference=reference, share=share, options=make_options(memory=memory, **options))
