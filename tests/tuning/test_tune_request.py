"""What a study is asked is checked before anything starts, and refused with what was seen, the bound, the way out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import UsageError
from autoaccum.tuning.request import TuneRequest, read_batches, read_rates
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Setting


def request(**changed: Any) -> TuneRequest:
    asked: dict[str, Any] = {"reference": "model.py", "target_batch": BatchSpan(64, 64)} | changed
    return TuneRequest(**asked)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reference": 7}, "what is to be tuned is int"),
        ({"trials": 0}, "trials is 0: give a whole number of at least 1"),
        ({"trials": True}, "trials is True"),
        ({"confirm": -1}, "confirm is -1: give a whole number of at least 0"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"budget_samples": 0}, "budget_samples is 0"),
        ({"budget_seconds": math.inf}, "budget_seconds is inf: give seconds, more than 0"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"budget_samples": 5, "budget_seconds": 5.0}, "budget_samples and budget_seconds are both given"),
        ({"sampler": "grid"}, "sampler is 'grid': take one of tpe, random"),
        ({"pruner": "median"}, "pruner is 'median': take one of halving, none"),
        ({"storage": " "}, "storage is ' '"),
        ({"study": 3}, "study is 3"),
        ({"memory": "much"}, "much"),
        ({"memory": -5}, "memory is -5: give a size"),
        ({"reserve": [1]}, r"reserve is \[1\]"),
        ({"seed": 2**32}, "seed is 4294967296: give one of at most 2147483647"),
        ({"storage": "a\0b"}, "storage is"),
        ({"optimizer": 3}, "optimizer is 3"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        request(**changed)


def test_a_path_is_a_reference_and_whole_numbers_may_be_numpys() -> None:
    import numpy as np

    asked = request(reference=Path("a/model.py"), trials=np.int64(7), storage=Path("a/tune.db"))
    assert (asked.reference, asked.trials, asked.storage) == ("a/model.py", 7, "a/tune.db")


@pytest.mark.parametrize(
    ("changed", "budget"),
    [
        ({}, None),
        ({"budget_samples": 100}, Budget(100, "samples")),
        ({"budget_seconds": 2.5}, Budget(2.5, "seconds")),
    ],
)
def test_the_budget_is_one_or_the_other(changed: dict[str, Any], budget: Budget | None) -> None:
    assert request(**changed).budget == budget


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("1e-1..1e-4", "'1e-1..1e-4' are an empty range"),
        ("1e-3..1e-3", "are an empty range"),
        ("0..1", "the learning rates are '0..1': give two numbers above 0, the smaller first"),
        ("1e-4..inf", "1e-4..inf"),
        ("nan..1", "nan..1"),
        ("1e-4", "the learning rate is '1e-4'"),
        ("a..b", "a..b"),
        ("1..2..3", "1..2..3"),
        (0.1, "0.1"),
        ((1e-1, 1e-4), "0.1..0.0001"),
        ((True, 2), "True..2"),
    ],
)
def test_rates_that_are_no_range(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_rates(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("1024..64", "the target batches '1024..64' are an empty range"),
        ("0", "target batch is 0"),
        (0, "target batch is 0"),
        (-4, "target batch is -4"),
        ("2.5", "target batch is 2.5"),
        ("many", "target batch is many"),
        (True, "target batch is True"),
        ("64..", "'64..'"),
        ("..64", "'..64'"),
        ((1, 2, 3), r"\(1, 2, 3\)"),
    ],
)
def test_batches_that_are_no_range(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_batches(given)


@given(low=st.integers(1, 10**6), more=st.integers(0, 10**6))
def test_batches_are_read_as_they_are_written(low: int, more: int) -> None:
    assert read_batches(f"{low}..{low + more}") == read_batches((low, low + more)) == BatchSpan(low, low + more)
    assert read_batches(str(low)) == read_batches(low) == BatchSpan(low, low)


@given(low=st.floats(1e-12, 1e3), factor=st.floats(1.001, 1e6))
def test_rates_are_read_as_they_are_written(low: float, factor: float) -> None:
    span = read_rates(f"{low!r}..{low * factor!r}")
    assert span == RateSpan(low, low * factor)
    assert low in span
    assert low * factor * 1.01 not in span


@given(target=st.integers(1, 5000), micro_batch=st.integers(1, 6000))
def test_a_setting_s_parts_make_up_its_batch(target: int, micro_batch: int) -> None:
    parts = Setting(learning_rate=0.1, target_batch=target, micro_batch=micro_batch).parts
    assert sum(parts) == target
    assert max(parts) <= micro_batch
    assert len(parts) == -(-target // micro_batch)
