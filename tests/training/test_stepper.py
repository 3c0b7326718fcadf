from __future__ import annotations

import json
import math

from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.accumulation.out_of_memory import shrink
from autoaccum.training.stepper import Ceiling

SIZES = st.integers(1, 2000)
LIMITS = st.lists(st.integers(1, 2000), min_size=1, max_size=200)


def update(size: int, limit: int, batch: int) -> tuple[int, int]:
    """Return retries and ceiling after `batch` samples, of which at most `limit` fit at once."""
    retries = 0
    while (largest := math.ceil(batch / math.ceil(batch / size))) > limit:  # of equal parts
        size, retries = shrink(largest, retries), retries + 1
    return retries, size


def run(ceiling: Ceiling, limits: list[int]) -> list[tuple[int, int]]:
    """Return the retries of each update, and the ceiling after it."""
    seen = []
    for limit in limits:
        retries, size = update(ceiling.largest, limit, 4 * ceiling.planned)
        raised = ceiling.record(retries, size)
        assert ceiling.largest == (size if raised is None else raised)
        seen.append((retries, ceiling.largest))
    return seen


@given(SIZES, st.integers(1, 9), LIMITS)
def test_it_stays_between_one_and_what_was_planned(planned: int, patience: int, limits: list[int]) -> None:
    assert all(1 <= largest <= planned for _, largest in run(Ceiling(planned, patience=patience), limits))


@settings(max_examples=count_examples(30))
@given(SIZES, st.data())
def test_a_smaller_limit_that_stays_costs_few_retries(planned: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, planned))
    ceiling = Ceiling(planned)
    first = run(ceiling, [limit] * 1000)
    failures = [retries for retries, _ in first if retries]
    assert len(failures) <= 2 + 2 * math.log2(1000)
    assert max(failures, default=0) <= 4 + math.log2(planned)
    later = run(ceiling, [limit] * 4000)
    assert sum(retries > 0 for retries, _ in later) <= 5


@given(st.integers(2, 2000), st.data())
def test_a_raise_that_fails_does_not_lower_what_fitted(planned: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, planned - 1))
    sizes = [size for _, size in run(Ceiling(planned, patience=3), [limit] * 500)]
    settled = [size for size in sizes if size <= limit]
    assert settled == sorted(settled)


def test_a_success_restores_the_patience() -> None:
    ceiling = Ceiling(256, patience=4)
    run(ceiling, [100] * 100)
    assert ceiling.patience > 4
    run(ceiling, [256] * 1000)
    assert (ceiling.largest, ceiling.patience) == (256, 4)


@given(SIZES, LIMITS, LIMITS)
def test_it_continues_from_its_state_as_if_never_stopped(planned: int, before: list[int], after: list[int]) -> None:
    ceiling, other = Ceiling(planned, patience=2), Ceiling(planned, patience=2)
    run(ceiling, before)
    other.restore(json.loads(json.dumps(ceiling.state())))
    assert other.state() == ceiling.state()
    assert run(other, after) == run(ceiling, after)
