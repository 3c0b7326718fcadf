"""A study's arguments are checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from small_studies import request_of

from autoaccum.errors import UsageError
from autoaccum.tuning.tuning_records import read_rates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": 3}, "the workload is a int"),
        ({"target_batch": "64..16"}, "target_batch is '64..16': give a whole number"),
        ({"trials": 0}, "trials is 0: give a whole number of at least 1"),
        ({"budget_samples": 0}, "budget_samples is 0"),
        ({"storage": "postgresql://me:secret@host/db"}, "the storage is a URL, of postgresql: give an SQLite file"),
    ],
    ids=range(5),
)
def test_invalid_requests_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request_of(**options)


@pytest.mark.parametrize("given", ["0.1", "1e-1..1e-4", "0..1", "1..inf", (0.1,), 0.1, "a..b"])
def test_invalid_rate_ranges_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="the learning rate is"):
        read_rates(given)
