"""Simulated devices for many cards. Cards that answer alike share their traces, and one process makes all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import ListAlike, Tracer, UseCard
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.simulation.allocator.replay import Replays
from autoaccum.simulation.cards import Card

_Result = TypeVar("_Result")


class CardFleet:
    """The devices of many cards.

    Args:
        make_tracer: Starts the process that traces the workload on a card, of which others may share the traces.
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
        self._make_tracer, self._make_device = make_tracer, make_device
        self._share, self._confirms = share, confirms
        self._replays = Replays()
        self._tracer: Tracer | None = None
        self._traced: CardGroup | None = None

    def each(
        self, cards: Sequence[Card], use: Callable[[Card, SimulatedDevice], _Result]
    ) -> Iterator[tuple[Card, _Result]]:
        """Use the device of each card; those that no trace tells apart come together."""
        waiting = list(cards)
        while waiting:
            group = CardGroup(self, waiting[0], waiting[1:])
            traces = TraceCache(lambda group=group: group, self._share, confirms=self._confirms)  # type: ignore[misc]
            for card in (group.card, *group.alike):
                if not group.is_alike(card):
                    continue
                result = use(card, self._make_device(card, traces, self._replays))
                if group.is_alike(card):  # Else what was traced for this card has told it from that of the group.
                    waiting.remove(card)
                    yield card, result

    def call(self, group: CardGroup, request: Request[Reply], limit_seconds: float | None) -> Reply:
        """Call the process as the card of a group, and learn which cards would have had another answer."""
        if self._tracer is not None and self._traced is not group:
            if self._tracer.call(UseCard(card=group.card, others=group.alike)):
                self._traced = group
            else:  # Something in the process keeps an answer of another card.
                self.close()
        if self._tracer is None:
            self._tracer, self._traced = self._make_tracer(group.card, group.alike), group
        reply = self._tracer.call(request, limit_seconds)
        names = self._tracer.call(ListAlike())
        group.alike = tuple(card for card in group.alike if card.name in names)
        return reply

    def close(self) -> None:
        """End the process, if it runs."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()


class CardGroup:
    """A card, and the cards that answered alike whatever was traced so far. It is the tracer of its `TraceCache`."""

    def __init__(self, fleet: CardFleet, card: Card, others: Sequence[Card]) -> None:
        self._fleet, self.card, self.alike = fleet, card, tuple(others)

    def is_alike(self, card: Card) -> bool:
        """Return whether nothing that was traced so far could tell a card from that of the group."""
        return card == self.card or card in self.alike

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Call the process as this card."""
        return self._fleet.call(self, request, limit_seconds)

    def close(self) -> None:
        """End the process after a failure; what it was asked of the card is not known, so nothing is shared."""
        self.alike = ()
        self._fleet.close()
