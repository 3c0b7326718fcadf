"""The savers that are chosen are the cheapest that fit, found in few trials."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.schedule import even_parts
from autoaccum.planning.saver_trials import Parts, Words, choose_savers, find_front, list_sets, with_blocks
from autoaccum.spec import OFFLOADS


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
        usable = [
            words
            for words in every_set(self.blocks)
            if not self.unusable & set(words) and self.needs(words) <= self.limit
        ]
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
def test_the_choice_is_the_cheapest_of_all_that_fit_and_few_are_tried(card: MadeUpCard) -> None:
    chosen = card.choose()
    each = 1 if not card.blocks else 2 + math.ceil(math.log2(card.blocks))
    sets = {tuple(word for word in words if word in OFFLOADS) for words in card.tried}
    assert len(card.tried) == len(set(card.tried)) <= each * len(sets)
    least = card.by_trying_all()
    if chosen is None:
        assert least == math.inf
        return
    assert math.isclose(card.cost(chosen), least)
    if count(chosen):
        one_less = with_blocks(tuple(word for word in chosen if word in OFFLOADS), count(chosen) - 1)
        assert one_less in card.tried
        assert not card.fits(one_less)
    assert card.fits(chosen)


@pytest.mark.parametrize(
    ("limit", "saved", "cost", "chosen", "tried"),
    [
        (100, 10, 1.0, (), [()]),
        (5, 10, 1.0, None, [(), ("recompute=12",), ("recompute=12", *OFFLOADS)]),
        (80, 30, 99.0, ("recompute=4",), None),
    ],
    ids=["nothing is needed", "nothing fits", "offloads cost more than the blocks that were found"],
)
def test_nothing_needless_is_tried(
    limit: int, saved: int, cost: float, chosen: Words | None, tried: list[Words] | None
) -> None:
    card = MadeUpCard(limit, dict.fromkeys(OFFLOADS, saved), dict.fromkeys(OFFLOADS, cost), [5] * 12, 1.0)
    assert card.choose() == chosen
    assert tried in (None, card.tried)
    assert tried is not None or not any(set(OFFLOADS) & set(words) for words in card.tried)


SHARE = 64


def every_set(blocks: int) -> list[Words]:
    sets = [chosen for number in range(4) for chosen in combinations(OFFLOADS, number)]
    return [with_blocks(chosen, each) for chosen in sets for each in range(blocks + 1)]


def parts_of(micro_batch: int) -> Parts:
    return even_parts(SHARE, -(-SHARE // micro_batch))


@given(
    st.dictionaries(
        st.sampled_from(every_set(4)),
        st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(0, SHARE)),
    )
)
def test_the_front_is_that_of_trying_all(known: dict[Words, tuple[int, int, int]]) -> None:
    """Each set takes some time, and some more for each part; up to some size fits, or none."""
    tried: list[Words] = []

    def seconds(words: Words, parts: Parts) -> float:
        return known[words][0] + known[words][1] * len(parts)

    def largest(words: Words, above: int) -> Parts | None:
        assert words not in tried
        tried.append(words)
        fits = known[words][2]
        return parts_of(fits) if fits and max(parts_of(fits)) > above else None

    front = find_front(known, seconds, largest, (SHARE,))
    every = {words: parts_of(most) for words, (_, _, most) in known.items() if most}
    for words, parts in every.items():
        beaten_by = [other for other, more in front.items() if seconds(other, more) <= seconds(words, parts)]
        assert any(max(front[other]) >= max(parts) for other in beaten_by), "it is in the front, or is beaten by one"
    for (faster, smaller), (slower, larger) in combinations(front.items(), 2):
        assert seconds(faster, smaller) < seconds(slower, larger)
        assert max(smaller) < max(larger)
    assert all(every[words] == parts for words, parts in front.items())


@given(st.integers(0, 40), st.integers(0, 41), st.integers(0, 3))
def test_sets_recompute_quarters_and_the_least_that_fit(total: int, least: int, needed: int) -> None:
    """So many blocks are to be recomputed for one sample to fit, or so many offloads are needed in their place."""
    found = list_sets(OFFLOADS, total, lambda words: count(words) >= least or len(set(words) & set(OFFLOADS)) >= needed)
    for number in range(4):
        for offloaded in combinations(OFFLOADS, number):
            counts = [count(words) for words in found if set(words) & set(OFFLOADS) == set(offloaded)]
            lowest = 0 if number >= needed else least
            quarters = {total * part // 4 for part in range(5)}
            assert counts == ([] if lowest > total else sorted({lowest, *(one for one in quarters if one > lowest)}))
