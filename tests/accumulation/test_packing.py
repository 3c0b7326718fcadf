"""Micro-batches within a budget of tokens: no other cut of the sorted samples costs less."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.packing import pack, part_cost

LENGTHS = st.lists(st.integers(0, 30), max_size=8)


def price(parts: list[list[int]], micro_tokens: int) -> int:
    return sum(map(part_cost, parts)) + len(parts) * -(-micro_tokens // 16)


@given(LENGTHS, st.integers(1, 150))
def test_padded_micro_batches_have_the_fewest_tokens_for_their_number(lengths: list[int], micro_tokens: int) -> None:
    packed = pack(lengths, micro_tokens)
    assert sorted(index for part in packed for index in part) == [*range(len(lengths))]
    parts = [[lengths[index] for index in part] for part in packed]
    assert all(len(part) == 1 or part_cost(part) <= micro_tokens for part in parts)
    ordered, inner = sorted(lengths, reverse=True), range(1, len(lengths))
    assert [length for part in parts for length in part] == ordered
    for number in range(len(lengths)):
        for ends in combinations(inner, number):
            others = [ordered[start:end] for start, end in pairwise([0, *ends, len(lengths)])]
            if all(len(part) == 1 or part_cost(part) <= micro_tokens for part in others):
                assert price(parts, micro_tokens) <= price(others, micro_tokens)


def test_a_few_more_micro_batches_save_most_of_the_padding() -> None:
    lengths = [8000, *[300] * 30, *[20] * 60]
    parts = [[lengths[index] for index in part] for part in pack(lengths, 32_000)]
    assert [len(part) for part in parts] == [1, 30, 60]
