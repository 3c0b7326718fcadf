"""Simulated devices for many cards, one after the other, whose traces are shared where the cards answer alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import ListAlike, Tracer
from autoaccum.devices.simulated.tracing.trace_cache import TraceCache

if TYPE_CHECKING:
    from autoaccum.devices.simulated.allocator.replayer import Replays


class CardFleet:
    """The devices of many cards, of which one at a time is simulated, for itself and for those that answer alike.

    Args:
        make_tracer: Starts a process that traces the workload on a card, of which others may share the traces.
        make_device: Makes the device of a card from traces, and from replays that cards may have in common.
        share: As of `TraceCache`.
        confirms: As of `TraceCache`.
    """

    def __init__(
        self,
        make_tracer: Callable[[Card, tuple[Card, ...]], Tracer],
        make_device: Callable[[Card, TraceCache, Replays], SimulatedDevice],
        share: int,
        *,
        confirms: bool = False,
    ) -> None:
        self._make_tracer, self._make_device, self._share = make_tracer, make_device, share
        self._confirms = confirms
        self._traces: TraceCache | None = None
        self._card: Card | None = None

    def use(self, card: Card, others: Sequence[Card]) -> None:
        """Trace on this card from now on; `others` may share its traces."""
        kept = None if self._traces is None else self._traces.hand_over(card, others)
        # After a failure, a new process does not know what was asked of the card before, and shares nothing.
        sharing = iter([] if kept is not None else [tuple(others)])
        self._traces = TraceCache(
            lambda: self._make_tracer(card, next(sharing, ())), self._share, confirms=self._confirms, tracer=kept
        )
        self._card = card

    def is_alike(self, card: Card) -> bool:
        """Return whether nothing that was traced so far could tell the card from the one that is traced on."""
        assert self._traces is not None
        return card == self._card or card.name in self._traces.call(ListAlike())

    def device(self, card: Card) -> SimulatedDevice:
        """Return the device of a card that is alike; closing it leaves the traces alone."""
        assert self._traces is not None
        return self._make_device(card, self._traces, self._replays)

    @cached_property
    def _replays(self) -> Replays:
        from autoaccum.devices.simulated.allocator.replayer import Replays  # Later, so that the tracer starts sooner.

        return Replays()

    def close(self) -> None:
        """End the tracer's process, if it runs."""
        if self._traces is not None:
            self._traces.close()
