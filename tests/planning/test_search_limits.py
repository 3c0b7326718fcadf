from __future__ import annotations

import pytest
from factories import FakeClock

from autoaccum.planning.search import SearchStopped
from autoaccum.planning.trial_runner import SearchLimits


@pytest.mark.parametrize(("most", "text"), [(3, "the limit of 3 trials$"), (1, "the limit of 1 trial$")])
def test_trials(most: int, text: str) -> None:
    limits = SearchLimits(most)
    limits.check_number(most - 1)
    with pytest.raises(SearchStopped, match=text) as stopped:
        limits.check_number(most)
    assert stopped.value.stop == "trials"
    assert limits.seconds_left() is None


def test_time_keeps_what_the_confirmation_takes() -> None:
    clock = FakeClock()
    limits = SearchLimits(None, 60.0, clock.seconds, clock)
    assert limits.seconds_left() == 60.0
    clock.seconds += 45
    assert limits.seconds_left(5.0) == 10.0
    with pytest.raises(SearchStopped, match="the time limit of 60 s") as stopped:
        limits.seconds_left(15.0)
    assert stopped.value.stop == "time"
