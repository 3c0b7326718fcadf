from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.card_meter import card_limit, memory_fraction, read_card, settable_fraction
from autoaccum.units import GIB, MIB

TOTALS = st.integers(MIB, 1024 * GIB)


def permitted_bytes(fraction: float, total_bytes: int) -> int:
    """As setMemoryFraction in c10/cuda/CUDACachingAllocator.cpp computes it: in doubles, then cut."""
    return int(fraction * float(total_bytes))


@given(total=TOTALS, data=st.data())
def test_a_fraction_never_permits_more_than_the_limit(total: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(0, total))
    fraction = memory_fraction(limit, total)
    assert 0 <= fraction <= 1
    assert limit - 2 <= permitted_bytes(fraction, total) <= limit


@pytest.mark.parametrize("total", [25_769_803_776, 25_327_894_528, 85_017_493_504, 10 * GIB])
@pytest.mark.parametrize("limit", [1, 2 * MIB, 10 * MIB + 1, 8 * GIB, 10 * GIB - 1])
def test_real_totals(total: int, limit: int) -> None:
    assert limit - 1 <= permitted_bytes(memory_fraction(limit, total), total) <= limit


def test_beyond_the_card_is_all_of_it_and_below_nothing_is_nothing() -> None:
    assert memory_fraction(25 * GIB, 24 * GIB) == 1.0
    assert memory_fraction(-1, 24 * GIB) == 0.0
    assert isinstance(memory_fraction(0, 24 * GIB), float)


@given(limit=st.integers(0, 2**64 - 1), total=TOTALS)
def test_whatever_fraction_an_allocator_tells_can_be_set_again(limit: int, total: int) -> None:
    """Both allocators tell their limit over the card's total; that of cudaMallocAsync is 2**64 - 1 until one is set."""
    fraction = settable_fraction(limit / total)
    assert 0.0 <= fraction <= 1.0
    assert limit > total or fraction == limit / total


@pytest.mark.without_gpu
def test_without_a_card_pytorchs_own_error_comes_and_nothing_is_set() -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        read_card(0)
    with pytest.raises((RuntimeError, AssertionError)), card_limit(0, GIB):
        pytest.fail("entered")
