"""What the allocator holds, event by event, is what a replay tells of the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.simulated.replay import replay, reserved_over
from autoaccum.units import MIB


def test_of_an_update_the_repetition_is_told() -> None:
    # The first time, 30 MiB are asked for where 20 are cached, and the second time there are both.
    events, sizes = (0, 1, ~1, 2, ~2, 3, ~3), (MIB, 20 * MIB, 30 * MIB, 2 * MIB)
    first, cached = 2 * MIB, 52 * MIB
    assert reserved_over(events, sizes, repeat_from=len(events)) == [first, *2 * [22 * MIB], *4 * [cached]]
    assert reserved_over(events, sizes, repeat_from=1) == [first, *6 * [cached]]


@given(st.lists(st.integers(0, 1 << 25), min_size=1, max_size=20), st.data())
def test_the_most_is_the_peak_of_a_replay(sizes: list[int], data: st.DataObject) -> None:
    events: list[int] = []
    for block in range(len(sizes)):
        events.append(block)
        alive = sorted(set(events) - {~event for event in events if event < 0} - {e for e in events if e < 0})
        events.extend(~block for block in data.draw(st.lists(st.sampled_from(alive), unique=True, max_size=2)))
    start = data.draw(st.integers(0, len(events)))
    held = reserved_over(events, sizes, repeat_from=start)
    assert len(held) == len(events)
    assert max(held) == replay(events, sizes, repeat_from=start).peak_reserved_bytes
