"""Simulated devices for many cards, whose traces are shared where the cards answer alike, and made ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import ListAlike, Tracer, UseCard
from autoaccum.devices.simulated.tracing.trace_cache import TraceCache
from autoaccum.errors import AutoaccumError, NotMeasuredError

if TYPE_CHECKING:
    from autoaccum.devices.simulated.allocator.replayer import Replays

MakeTracer = Callable[[Card, tuple[Card, ...]], Tracer]
"""Starts a process that traces the workload on a card, of which others may share the traces."""


class CardFleet:
    """The devices of many cards. One process traces for all: for a card, and for those that answer alike.

    Args:
        make_tracer: Starts that process.
        make_device: Makes the device of a card from traces, and from replays that cards may have in common.
        share: As of `TraceCache`.
        confirms: As of `TraceCache`.
    """

    def __init__(
        self,
        make_tracer: MakeTracer,
        make_device: Callable[[Card, TraceCache, Replays], SimulatedDevice],
        share: int,
        *,
        confirms: bool = False,
    ) -> None:
        self._process = _SharedProcess(make_tracer)
        self._make_device, self._share, self._confirms = make_device, share, confirms
        self._thread = ThreadPoolExecutor(1)

    def group(self, card: Card, others: Sequence[Card]) -> CardGroup:
        """Return the group of a card, to which those of the others belong that no trace tells from it."""
        return CardGroup(card, others, self._process, self._share, confirms=self._confirms)

    def device(self, card: Card, group: CardGroup) -> SimulatedDevice:
        """Return the device of a card of a group; closing it leaves the traces alone."""
        return self._make_device(card, group.traces, self._replays)

    def work_ahead(self, group: CardGroup, others: Sequence[Card]) -> tuple[CardGroup | None, Future[None]]:
        """While this process replays the traces of a group, count its cost, and trace for the next one.

        Returns:
            The group of the first of the others that is told from this one, if there is one; what to wait for.
        """
        told = next((card for card in others if not group.is_alike(card)), None)
        following = None if told is None else self.group(told, [card for card in others if card != told])

        def work() -> None:
            with suppress(AutoaccumError):  # Whoever needs it meets it again.
                group.trace_smallest()
                self.device(group.card, group).count_cost()
                if following is not None and self._process.can_switch(following):
                    following.traces.inspect()
                    following.traces.extrapolate(max(following.traces.small_sizes))
                    following.trace_smallest()

        return following, self._thread.submit(work)

    @cached_property
    def _replays(self) -> Replays:
        from autoaccum.devices.simulated.allocator.replayer import Replays  # Later, so that the tracer starts sooner.

        return Replays()

    def close(self) -> None:
        """End the process, if it runs, and the work ahead with it."""
        self._process.close()
        self._thread.shutdown()


class CardGroup:
    """A card, the cards that answered alike whatever was traced so far, and their traces.

    It is the tracer of its own `TraceCache`.
    """

    def __init__(
        self, card: Card, others: Sequence[Card], process: _SharedProcess, share: int, *, confirms: bool
    ) -> None:
        self.card, self.alike = card, tuple(others)
        self._process = process
        self.traces = TraceCache(lambda: self, share, confirms=confirms)

    def is_alike(self, card: Card) -> bool:
        """Return whether nothing that was traced so far could tell a card from that of the group."""
        return card == self.card or card in self.alike

    def trace_smallest(self) -> None:
        """Trace the least micro-batch, which no trace of larger ones tells, and which the smallest cards need."""
        if self.traces.share >= 2 * self.traces.step:
            self.traces.make((self.traces.step, self.traces.step))

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        """Call the process as this card."""
        return self._process.call(self, request, limit_seconds)

    def close(self) -> None:
        """End the process after a failure; what it was asked of the card is not known, so nothing is shared."""
        self.alike = ()
        self._process.close()


class _SharedProcess:
    """The process that traces for all groups, for one at a time; it is started by the thread that made this."""

    def __init__(self, make_tracer: MakeTracer) -> None:
        self._make_tracer = make_tracer
        self._tracer: Tracer | None = None
        self._user: CardGroup | None = None
        self._lock, self._starter = threading.RLock(), threading.get_ident()

    def call(self, user: CardGroup, request: Request[Reply], limit_seconds: float | None) -> Reply:
        with self._lock:
            if not self.can_switch(user):
                self.close()
            if self._tracer is None:
                if threading.get_ident() != self._starter:  # A child of a thread would die with it.
                    raise NotMeasuredError("the process that traces has ended")
                self._tracer = self._make_tracer(user.card, user.alike)
                self._user = user
            tracer = self._tracer
            reply = tracer.call(request, limit_seconds)
            names: tuple[str, ...] = tracer.call(ListAlike())
            user.alike = tuple(card for card in user.alike if card.name in names)
            return reply

    def can_switch(self, user: CardGroup) -> bool:
        """Let the process simulate the card of a group, if it runs and nothing in it keeps an answer of another."""
        with self._lock:
            if self._tracer is not None and self._user is not user:
                if not self._tracer.call(UseCard(card=user.card, others=user.alike)):
                    return False
                self._user = user
            return self._tracer is not None

    def close(self) -> None:
        # Without the lock: it ends the call of another thread, too.
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.close()
