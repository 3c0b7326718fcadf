"""Micro-batches that are timed: doublings, and the ceiling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.errors import UsageError
from autoaccum.tuning.judging.ladder import micro_batch_ladder

SIZES = st.integers(1, 5000)


@given(ceiling=SIZES, least=SIZES)
def test_it_reaches_from_the_least_size_to_the_ceiling_in_doublings(ceiling: int, least: int) -> None:
    least = min(ceiling, least)
    ladder = micro_batch_ladder(ceiling, least)
    assert (ladder[0], ladder[-1]) == (least, ceiling)
    assert all(above == 2 * below for below, above in zip(ladder[:-1], ladder[1:-1], strict=False))
    assert all(below < above <= 2 * below for below, above in zip(ladder, ladder[1:], strict=False))


@given(ceiling=SIZES, target=SIZES, least=st.integers(1, 4))
def test_for_a_target_each_size_cuts_it_otherwise_and_none_too_small(ceiling: int, target: int, least: int) -> None:
    ceiling, target = max(ceiling, least), max(target, least)
    whole = micro_batch_ladder(ceiling, least)
    schedules = {size: make_schedule(target, size) for size in whole}
    fitting = [size for size in whole if schedules[size].smallest_part >= least]
    if not fitting:
        with pytest.raises(UsageError, match="has no parts"):
            micro_batch_ladder(ceiling, least, target)
        return
    ladder = micro_batch_ladder(ceiling, least, target)
    cuts = [schedules[size].iter_size for size in ladder]
    assert len(set(cuts)) == len(cuts)
    assert set(cuts) == {schedules[size].iter_size for size in fitting}
    assert set(ladder) <= set(fitting)


@pytest.mark.parametrize(("ceiling", "least"), [(0, 1), (3, 4), (4, 0)])
def test_an_empty_range_is_refused(ceiling: int, least: int) -> None:
    with pytest.raises(UsageError, match=f"micro-batches from {least} to {ceiling} are an empty range"):
        micro_batch_ladder(ceiling, least)
