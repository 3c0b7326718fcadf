"""Measurements of many workloads by one process: the device that a guard asks, with its child in this process."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from autoaccum.devices.base import Inspection, TrialSettings
from autoaccum.devices.simulated.catalog import Card, find_card
from autoaccum.devices.simulated.device import SimulatedDevice
from autoaccum.devices.simulated.jobs import SimulatedChild
from autoaccum.devices.simulated.labels import LabelledTrace
from autoaccum.devices.simulated.trace import Trace
from autoaccum.devices.simulated.tracer import Offer
from autoaccum.devices.torch_release import read_torch_release
from autoaccum.errors import WorkloadError


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
        request = {**self._settings.to_request(), "optimizer": self._settings.optimizer, "job": job, **asked}
        reply: dict[str, Any] = json.loads(json.dumps(self._child.answer(request)))
        if "failure" in reply:
            raise WorkloadError(f"{job}: {reply['failure']['message']}\n{reply['failure'].get('traceback')}")
        return reply


def device_here(settings: TrialSettings, gpu: str = "rtx3090") -> SimulatedDevice:
    """A simulated card whose traces are made in this process."""
    card = find_card(gpu)
    return SimulatedDevice(
        card, lambda: TracerHere(settings, card), share=settings.share, torch_version=read_torch_release()
    )
