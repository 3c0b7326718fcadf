"""Traces of a simulated card in this process, which are quicker to come by than those of a child."""

from __future__ import annotations

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.failures import Failure
from autoaccum.devices.child.requests import Reply, Request, read_request, reply_to_json
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LoadOnCard, Tracer
from autoaccum.errors import WorkloadError
from autoaccum.simulation.cards import Card


class InProcessTracer(Tracer):
    """A child that is none: it simulates in this process, until it is closed."""

    def __init__(self, settings: TrialSettings, card: Card) -> None:
        self._child = SimulatedChild()
        self.call(LoadOnCard(card=card, **settings.to_request()))

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        reply = self._child.handle(read_request(request.to_json()))
        if isinstance(reply, Failure):
            raise WorkloadError(f"{request.doing}: {reply.message}\n{reply.traceback}")
        return request.read_reply(reply_to_json(reply))

    def close(self) -> None:
        self._child.close()
