"""Traces of a simulated card in this process, which are quicker to come by than those of a child."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from autoaccum.devices.base import Inspection, TrialSettings
from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.tracing.trace_cache import Tracer
from autoaccum.errors import WorkloadError


class InProcessTracer(Tracer):
    """A child that is none: it simulates in this process, until it is closed."""

    def __init__(self, settings: TrialSettings, card: Card) -> None:
        self._settings, self._child = settings, SimulatedChild()
        where: dict[str, Any] = {"cwd": str(Path.cwd()), "sys_path": list(sys.path)}
        self.ask("load", card=dataclasses.asdict(card), pythonpath=os.environ.get("PYTHONPATH"), **where)

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        return Inspection(**self.ask("inspect")["inspection"])

    def ask(self, job: str, *, limit_seconds: float | None = None, **asked: Any) -> dict[str, Any]:
        request = {**self._settings.to_request(), "job": job, **asked}
        reply: dict[str, Any] = json.loads(json.dumps(self._child.answer(request)))
        if "failure" in reply:
            raise WorkloadError(f"{job}: {reply['failure']['message']}\n{reply['failure'].get('traceback')}")
        return reply

    def close(self) -> None:
        self._child.close()
