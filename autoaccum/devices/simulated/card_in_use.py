"""The card that a process simulates, with a record of which other cards a trace could not tell from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from autoaccum.devices.simulated.cards import Card

T = TypeVar("T")


class CardInUse:
    """A card that is asked for what a trace depends on, and the other cards that would have answered alike.

    The traces of all of these are the same: what a kernel takes beside its tensors is a rule in a trace, and worked out
    for each card when the trace is replayed.

    Attributes:
        card: The card.
        alike: The other cards whose answers are the same so far, in order.
        was_asked_by_code: Whether code has asked that may keep the answer, such as the workload or a library; kernels
            of the simulation ask with each call.

    Args:
        card: The card.
        others: The cards that may share its traces.
    """

    def __init__(self, card: Card, others: Iterable[Card] = ()) -> None:
        self.was_asked_by_code = False
        self.switch(card, others)

    def switch(self, card: Card, others: Iterable[Card]) -> None:
        """Simulate another card from now on, which code that has asked before would not notice."""
        self.card, self.alike = card, list(others)

    def answer(self, question: Callable[[Card], T]) -> T:
        """Answer a question of code, which may keep the answer."""
        self.was_asked_by_code = True
        answer = question(self.card)
        self.alike = [card for card in self.alike if question(card) == answer]
        return answer

    def choose(self, kernel: Callable[[Card], T]) -> T:
        """Return the kernel that is chosen by a card's capability, and by nothing else of the card."""
        chosen = kernel(self.card)
        by_capability = {card.capability: card for card in self.alike}
        others = {capability for capability, card in by_capability.items() if kernel(card) != chosen}
        if others:
            self.alike = [card for card in self.alike if card.capability not in others]
        return chosen
