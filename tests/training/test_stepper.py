"""The ceiling falls when memory runs out, rises again, and seldom tries in vain."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.out_of_memory import shrink
from autoaccum.training.stepper import Ceiling

SIZES = st.integers(1, 2000)
LIMITS = st.lists(st.integers(1, 2000), min_size=1, max_size=200)


def run(ceiling: Ceiling, limits: list[int]) -> list[int]:
    """Return the retries of updates in which at most a number of samples fits at once."""
    seen = []
    for limit in limits:
        size, batch, retries = ceiling.largest, 4 * ceiling.planned, 0
        while (largest := math.ceil(batch / math.ceil(batch / size))) > limit:  # of equal parts
            size, retries = shrink(largest, retries), retries + 1
        seen.append(retries)
        assert 1 <= ceiling.record(retries, size) <= ceiling.planned
    return seen


@given(SIZES, st.data())
def test_a_smaller_limit_that_stays_costs_few_retries(planned: int, data: st.DataObject) -> None:
    retries = run(Ceiling(planned), [data.draw(st.integers(1, planned))] * 4000)
    assert sum(map(bool, retries)) <= 10
    assert max(retries) <= 4 + math.log2(planned)


@given(SIZES, LIMITS, LIMITS)
def test_it_continues_from_its_state_as_if_never_stopped(planned: int, before: list[int], after: list[int]) -> None:
    ceiling, other = Ceiling(planned, patience=2), Ceiling(planned, patience=2)
    run(ceiling, before)
    other.restore(json.loads(json.dumps(vars(ceiling))))
    assert run(other, after) == run(ceiling, after)
