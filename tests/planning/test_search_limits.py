from __future__ import annotations

import pytest
from factories import FakeClock

from autoaccum.planning.search import SearchStopped
from autoaccum.planning.trial_runner import SearchLimits


def test_trials() -> None:
    limits = SearchLimits(3, None)
    assert limits.seconds_left(2, 0.0) is None
    with pytest.raises(SearchStopped, match="the limit of 3 trials") as stopped:
        limits.seconds_left(3, 0.0)
    assert stopped.value.stop == "trials"
    assert limits.seconds_left(None, 0.0) is None
    with pytest.raises(SearchStopped, match="the limit of 1 trial$"):
        SearchLimits(1, None).seconds_left(1, 0.0)


def test_time_keeps_what_the_confirmation_takes() -> None:
    clock = FakeClock()
    limits = SearchLimits(None, 60.0, clock=clock)
    assert limits.seconds_left(0, 0.0) == 60.0
    clock.seconds += 20
    assert limits.seconds_left(1, 15.0) == 25.0
    clock.seconds += 25
    with pytest.raises(SearchStopped, match="the time limit of 60 s") as stopped:
        limits.seconds_left(1, 15.0)
    assert stopped.value.stop == "time"
    assert limits.seconds_left(1, 5.0) == 10.0
