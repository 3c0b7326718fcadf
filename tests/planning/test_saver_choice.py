"""The savers that are chosen are the cheapest that fit, found in few trials."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.options import OFFLOADS
from autoaccum.planning.saver_choice import Words, choose_savers, with_blocks


@dataclass
class MadeUpCard:
    """A card on which each offload, and each recomputed block, saves some memory and costs some time."""

    limit: int
    saved: dict[str, int]
    costs: dict[str, float]
    block_saves: list[int]
    block_cost: float
    unusable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.tried: list[Words] = []

    @property
    def blocks(self) -> int:
        return len(self.block_saves)

    def needs(self, words: Words) -> int:
        recomputed = count(words)
        return 100 - sum(self.saved[word] for word in words if word in OFFLOADS) - sum(self.block_saves[:recomputed])

    def fits(self, words: Words) -> bool:
        self.tried.append(words)
        return self.needs(words) <= self.limit and not self.unusable & set(words)

    def cost(self, words: Words) -> float:
        if self.unusable & set(words):
            return math.inf
        return 50 + sum(self.costs[word] for word in words if word in OFFLOADS) + self.block_cost * count(words)

    def choose(self) -> Words | None:
        return choose_savers(OFFLOADS, self.blocks, self.fits, self.cost)

    def by_trying_all(self) -> float:
        """The least cost of all that fit; infinite where none does."""
        sets = [chosen for number in range(4) for chosen in combinations(OFFLOADS, number)]
        every = [with_blocks(chosen, blocks) for chosen in sets for blocks in range(self.blocks + 1)]
        usable = [words for words in every if not self.unusable & set(words) and self.needs(words) <= self.limit]
        return min(map(self.cost, usable), default=math.inf)


def count(words: Words) -> int:
    return next((int(word.partition("=")[2]) for word in words if word not in OFFLOADS), 0)


amounts = st.integers(0, 40)
cards = st.builds(
    MadeUpCard,
    limit=st.integers(0, 110),
    saved=st.fixed_dictionaries(dict.fromkeys(OFFLOADS, amounts)),
    costs=st.fixed_dictionaries(dict.fromkeys(OFFLOADS, st.floats(0, 100))),
    block_saves=st.lists(st.integers(0, 10), max_size=12),
    block_cost=st.floats(0.1, 10),
    unusable=st.frozensets(st.sampled_from(OFFLOADS), max_size=2),
)


@given(cards)
def test_the_choice_is_the_cheapest_of_all_that_fit(card: MadeUpCard) -> None:
    chosen = card.choose()
    least = card.by_trying_all()
    if chosen is None:
        assert least == math.inf
        return
    assert card.fits(chosen)
    assert math.isclose(card.cost(chosen), least)


@given(cards)
def test_the_number_of_blocks_is_the_least_and_one_less_was_tried(card: MadeUpCard) -> None:
    chosen = card.choose()
    if chosen is None or not count(chosen):
        return
    offloads = tuple(word for word in chosen if word in OFFLOADS)
    one_less = with_blocks(offloads, count(chosen) - 1)
    assert one_less in card.tried
    assert not card.fits(one_less)


@given(cards)
def test_few_are_tried_and_none_twice(card: MadeUpCard) -> None:
    card.choose()
    each = 1 if not card.blocks else 2 + math.ceil(math.log2(card.blocks))
    sets = {tuple(word for word in words if word in OFFLOADS) for words in card.tried}
    assert len(card.tried) == len(set(card.tried)) <= each * len(sets)


def test_what_fits_without_needs_one_trial() -> None:
    card = MadeUpCard(100, dict.fromkeys(OFFLOADS, 10), dict.fromkeys(OFFLOADS, 1.0), [5] * 12, 1.0)
    assert card.choose() == ()
    assert card.tried == [()]


def test_offloads_that_cost_more_than_what_was_found_are_not_tried() -> None:
    card = MadeUpCard(80, dict.fromkeys(OFFLOADS, 30), dict.fromkeys(OFFLOADS, 99.0), [5] * 12, 1.0)
    assert card.choose() == ("recompute=4",)
    assert not any(set(OFFLOADS) & set(words) for words in card.tried)
