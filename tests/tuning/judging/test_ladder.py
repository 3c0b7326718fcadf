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


@given(ceiling=SIZES, targets=st.lists(SIZES, min_size=1, max_size=4), least=st.integers(1, 4))
def test_for_targets_each_size_cuts_the_largest_otherwise_and_none_too_small(
    ceiling: int, targets: list[int], least: int
) -> None:
    targets = sorted(max(target, least) for target in targets)
    ceiling = max(ceiling, least)
    fitting = [
        size for size in micro_batch_ladder(min(ceiling, targets[-1]), least) if smallest(size, targets) >= least
    ]
    if not fitting:
        with pytest.raises(UsageError, match=f"without a part below {least}"):
            micro_batch_ladder(ceiling, least, targets)
        return
    ladder = micro_batch_ladder(ceiling, least, targets)
    cuts = [make_schedule(targets[-1], size).iter_size for size in ladder]
    assert len(set(cuts)) == len(cuts)
    assert set(cuts) == {make_schedule(targets[-1], size).iter_size for size in fitting}
    assert set(ladder) <= set(fitting)


def smallest(size: int, targets: list[int]) -> int:
    """The smallest part that a size leaves."""
    return min(make_schedule(target, size).smallest_part for target in targets)


def test_targets_that_no_size_cuts_are_refused() -> None:
    """Rather than run with a part that a BatchNorm refuses."""
    with pytest.raises(UsageError, match=r"of 2 to 2 samples cuts updates of 3 and 4 .*: take multiples of 2"):
        micro_batch_ladder(2, 2, (3, 4))
    assert micro_batch_ladder(4, 2, (3, 4)) == (4,)


@pytest.mark.parametrize(("ceiling", "least"), [(0, 1), (3, 4), (4, 0)])
def test_an_empty_range_is_refused(ceiling: int, least: int) -> None:
    with pytest.raises(UsageError, match=f"micro-batches from {least} to {ceiling} are an empty range"):
        micro_batch_ladder(ceiling, least)
