"""Traces of a simulated card in this process, which are quicker to come by than those of a child."""

from __future__ import annotations

import json

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.failures import Failure
from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.child.requests import (
    Reply,
    Request,
    read_reply,
    read_request,
    request_message,
    to_json,
)
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LoadOnCard, Tracer
from autoaccum.errors import WorkloadError
from autoaccum.simulation.cards import Card


class InProcessTracer(Tracer):
    """A child that is none: it simulates in this process, until it is closed."""

    def __init__(self, settings: TrialSettings, card: Card) -> None:
        self._child = SimulatedChild()
        self.call(LoadOnCard(card=card, device=card.name, paths=ImportPaths.of(), **settings.to_request()))

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        reply = self._child.handle(read_request(json.loads(to_json(request_message(request)))))
        if isinstance(reply, Failure):
            raise WorkloadError(f"{request.doing}: {reply.message}\n{reply.traceback}")
        return read_reply(json.loads(to_json({"reply": reply})), request)

    def close(self) -> None:
        self._child.close()
