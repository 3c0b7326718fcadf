"""Packing is the best there is where that is promised, by comparison with every other way for few samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.packing import (
    check_target,
    cut_windows,
    pack,
    pack_in_order,
    part_cost,
    share_by_length,
)
from autoaccum.accumulation.schedule import slices
from autoaccum.errors import UsageError
from autoaccum.spec import Padding

PADDINGS = st.sampled_from(["longest", "none"])
FEW = st.lists(st.integers(1, 12), max_size=7)
MANY = st.lists(st.integers(1, 9000), max_size=60)


def is_allowed(lengths: list[int], budget: int, padding: Padding) -> bool:
    return len(lengths) == 1 or part_cost(lengths, padding) <= budget


def cheapest(lengths: list[int], budget: int, padding: Padding, price: Callable[[list[int]], int]) -> float:
    """Return the price of the best of all partitions, which is the sum of those of its parts."""

    @functools.cache
    def best(left: frozenset[int]) -> float:
        if not left:
            return 0
        first, *others = sorted(left)
        parts = ([first, *more] for size in range(len(left)) for more in combinations(others, size))
        priced = ((part, [lengths[index] for index in part]) for part in parts)
        allowed = ((part, price(of_part)) for part, of_part in priced if is_allowed(of_part, budget, padding))
        return min(of_part + best(left.difference(part)) for part, of_part in allowed)

    return best(frozenset(range(len(lengths))))


def fewest_in_order(lengths: list[int], budget: int, padding: Padding) -> float:
    least = [0.0] + [inf] * len(lengths)
    for end in range(1, len(lengths) + 1):
        starts = [start for start in range(end) if is_allowed(lengths[start:end], budget, padding)]
        least[end] = 1 + min(least[start] for start in starts)
    return least[-1]


@given(MANY, st.integers(1, 20000), PADDINGS)
def test_every_sample_is_in_one_part_within_the_budget(lengths: list[int], budget: int, padding: Padding) -> None:
    parts = pack(lengths, budget, padding)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    of_parts = [[lengths[index] for index in part] for part in parts]
    assert all(is_allowed(part, budget, padding) for part in of_parts)
    assert all(part == sorted(part, reverse=True) for part in of_parts)
    in_order = [lengths[part] for part in slices(pack_in_order(lengths, budget, padding))]
    assert sum(map(len, in_order)) == len(lengths)
    assert all(is_allowed(part, budget, padding) for part in in_order)


@given(FEW, st.integers(1, 40))
def test_padded_micro_batches_have_the_fewest_tokens_for_their_number(lengths: list[int], budget: int) -> None:
    def price(part: list[int]) -> int:
        return part_cost(part) + -(-budget // 16)

    packed = [[lengths[index] for index in part] for part in pack(lengths, budget)]
    assert sum(map(price, packed)) == cheapest(lengths, budget, "longest", price)
    assert [length for part in packed for length in part] == sorted(lengths, reverse=True)


def test_a_few_more_micro_batches_save_most_of_the_padding() -> None:
    lengths = [8000, *[300] * 30, *[20] * 60]
    parts = [[lengths[index] for index in part] for part in pack(lengths, 32_000)]
    assert [len(part) for part in parts] == [1, 30, 60]


@given(FEW, st.integers(1, 40))
def test_micro_batches_without_padding_are_nearly_the_fewest(lengths: list[int], budget: int) -> None:
    fewest = cheapest(lengths, budget, "none", lambda part: 1)
    assert len(pack(lengths, budget, "none")) <= 11 / 9 * fewest + 1


@given(st.lists(st.integers(1, 12), max_size=15), st.integers(1, 40), PADDINGS)
def test_micro_batches_in_order_are_the_fewest(lengths: list[int], budget: int, padding: Padding) -> None:
    assert len(pack_in_order(lengths, budget, padding)) == fewest_in_order(lengths, budget, padding)


@given(MANY, st.integers(1, 8))
def test_ranks_differ_by_less_than_a_sample(lengths: list[int], ranks: int) -> None:
    shares = share_by_length(lengths, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    loads = [part_cost([lengths[index] for index in share], "none") for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    for share in shares:
        parts = pack([lengths[index] for index in share], 9000)
        assert pack(lengths, 9000, share=share) == [[share[at] for at in part] for part in parts]


@given(MANY, st.integers(1, 9), st.integers(1, 20000))
def test_windows_are_as_small_as_their_target_allows(lengths: list[int], samples: int, tokens: int) -> None:
    pairs = list(enumerate(lengths))
    by_samples = list(cut_windows(pairs, samples, None))
    by_tokens = list(cut_windows(pairs, None, tokens))
    for windows in (by_samples, by_tokens):
        assert [pair for window in windows for pair in window] == pairs
    assert all(len(window) == samples for window, _ in pairwise(by_samples))
    counts = [[length for _, length in window] for window in by_tokens]
    assert all(part_cost(window, "none") >= tokens for window, _ in pairwise(counts))
    assert all(part_cost(window[:-1], "none") < tokens for window in counts)


def test_unusable_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="micro_tokens is 0: give a whole number"):
        pack([1], 0)
    with pytest.raises(UsageError, match="no target: give target_batch .--target-batch. or target_tokens"):
        check_target(None, None)
    with pytest.raises(UsageError, match="both target_batch and target_tokens are given: give one"):
        check_target(8, 60)
