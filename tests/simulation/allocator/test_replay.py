"""Replays of a trace in one allocator, as a trial and event by event."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import pytest
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.devices.simulated.simulated_device import predict_trial
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer, SizedTrace
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import EMPTY_CACHE, EMPTY_CACHE_ONCE, Trace, Workspace
from autoaccum.units import MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)
GRAINS = [100, 4096, 300 * 1024, MIB, 2 * MIB, 7 * MIB, 11 * MIB, 24 * MIB, 40 * MIB]


def sized(
    events: Sequence[int],
    sizes: Sequence[int],
    last_update: int | None = None,
    *,
    streams: tuple[int, ...] = (),
    optional: Mapping[int, str] = MappingProxyType({}),
) -> SizedTrace:
    """Return a trace by its events; without `last_update`, no update is repeated."""
    last = len(events) if last_update is None else last_update
    trace = Trace(parts=(1,), events=tuple(events), sizes=(), phases=(), last_update=last, streams=streams)
    return SizedTrace(trace, sizes, optional=optional)


def random_trace(rng: random.Random, blocks: int) -> tuple[list[int], list[int]]:
    events, live = list[int](), list[int]()
    for block in range(blocks):
        events.append(block)
        live.append(block)
        while len(live) > 12 or (live and rng.random() < 0.45):
            events.append(~live.pop(rng.randrange(len(live))))
    return events, [rng.choice(GRAINS) for _ in range(blocks)]


@pytest.mark.parametrize(
    ("events", "start", "expected"),
    [
        ((0, 1, ~1), 1, {}),
        ((0, 1, ~1, 2), 3, None),
        ((0, 1, ~1), 3, {}),
        ((0, 1), 1, None),
        ((0, 1, ~1, ~0), 1, None),
        ((0, 1, ~0), 1, None),
        ((0, 2, ~0), 1, {0: 2}),
        ((0, 2, 3, ~2, ~0), 1, {0: 3}),
        ((0, 1, 2, 4, ~1, ~0), 2, {0: 2, 1: 4}),
    ],
)
def test_replacements_are_as_large_as_the_blocks_they_replace(
    events: tuple[int, ...], start: int, expected: dict[int, int] | None
) -> None:
    assert sized(events, (8, 9, 8, 8, 9), start).replacements == expected


def turns(small: int) -> tuple[list[int], list[int]]:
    """Two updates of `small` blocks of 1 MiB at once, then a large one of as many."""
    events, sizes = list[int](), list[int]()
    for _ in range(2):
        blocks = range(len(sizes), len(sizes) + small)
        events += [*blocks, *(~block for block in blocks), blocks.stop, ~blocks.stop]
        sizes += [MIB] * small + [small * MIB]
    return events, sizes


def test_an_update_that_releases_cached_memory_every_time_is_counted() -> None:
    events, sizes = turns(30)
    repeated = sized(events, sizes, len(events) // 2)
    tight = repeated.replay(capacity=40 * MIB)
    assert (tight.fits, tight.retries, tight.repeat_retries) == (True, 5, 2)
    unlimited = repeated.replay(capacity=60 * MIB)
    assert (unlimited.retries, unlimited.repeat_retries) == (0, 0)
    assert sized(events, sizes).replay(capacity=40 * MIB).repeat_retries == 0, "updates are not repeated"


@given(st.lists(st.sampled_from(GRAINS), min_size=1, max_size=6))
def test_a_repeated_update_equals_a_longer_trace(kept: list[int]) -> None:
    def events_of(updates: int) -> tuple[list[int], list[int]]:
        """Each update allocates all of `kept`, and frees those of the one before, one by one."""
        events, count = list(range(len(kept))), len(kept)
        for update in range(1, updates):
            for index in range(count):
                events += [update * count + index, ~((update - 1) * count + index)]
        return events, kept * updates

    events, sizes = events_of(2)
    repeated = sized(events, sizes, len(kept))
    assert repeated.replacements is not None
    done, truth = repeated.replay(), sized(*events_of(3)).replay()
    assert done.peak_reserved_bytes == truth.peak_reserved_bytes
    assert done.peak_allocated_bytes == truth.peak_allocated_bytes


kinds = st.sampled_from(
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings(max_split_bytes=20 * MIB),
        AllocatorSettings(roundup_divisions=4),
    ]
)


@settings(max_examples=count_examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 60), kind=kinds)
def test_the_least_capacity_is_enough_and_a_byte_less_is_not(seed: int, blocks: int, kind: AllocatorSettings) -> None:
    events, sizes = random_trace(random.Random(seed), blocks)
    trace = sized(events, sizes)
    least, unlimited = trace.least_capacity(kind), trace.replay(kind)
    assert least <= unlimited.peak_reserved_bytes
    assert least >= max(sizes)
    assert trace.replay(kind, least).peak_reserved_bytes == least
    assert not sized(events, sizes).replay(kind, least - 1).fits


@settings(max_examples=count_examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), kind=kinds, share=st.floats(0.3, 1.1))
def test_a_result_holds_for_the_whole_range_of_capacities(seed: int, kind: AllocatorSettings, share: float) -> None:
    events, sizes = random_trace(random.Random(seed), 40)
    capacity = int(share * sized(events, sizes).replay(kind).peak_reserved_bytes)
    done = sized(events, sizes).replay(kind, capacity)
    assert done.peak_reserved_bytes <= capacity
    assert done == sized(events, sizes).replay(kind, done.peak_reserved_bytes)
    if done.valid_below_bytes is not None:
        assert done.valid_below_bytes > capacity
        assert done == sized(events, sizes).replay(kind, done.valid_below_bytes - 1)


@pytest.mark.parametrize("kind", [AllocatorSettings(), EXPANDABLE])
@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 1.0))
def test_the_order_of_frees_in_a_row_makes_no_difference(kind: AllocatorSettings, seed: int, share: float) -> None:
    events, sizes = random_trace(random.Random(seed), 60)
    for start in range(10, len(events), 15):  # Longer rows: some frees come early.
        frees = [event for event in events[start:] if event < 0 and ~event in events[:start]]
        events = [*events[:start], *frees[:4], *(event for event in events[start:] if event not in frees[:4])]
    sorted_events: list[int] = []
    for are_frees, group in groupby(events, lambda event: event < 0):
        row = list(group)
        sorted_events += sorted(row) if are_frees else row
    capacity = int(share * sized(events, sizes).replay(kind).peak_reserved_bytes)
    for limit in (None, capacity):
        assert sized(sorted_events, sizes).replay(kind, limit) == sized(events, sizes).replay(kind, limit)


def test_a_refused_optional_block_is_left_out() -> None:
    events, sizes = (0, 1, ~1, 2, ~2, ~0), (30 * MIB, 40 * MIB, 20 * MIB)
    assert sized(events, sizes).replay(capacity=50 * MIB).failed_at == 1
    optional = sized(events, sizes, optional={1: "workspace"})
    done = optional.replay(capacity=50 * MIB)
    assert (done.fits, done.peak_reserved_bytes, done.valid_below_bytes) == (True, 50 * MIB, 70 * MIB)
    assert optional.replay(capacity=70 * MIB).peak_reserved_bytes == 70 * MIB
    assert optional.replay(capacity=40 * MIB).failed_at == 3
    assert optional.least_capacity() == 50 * MIB


@pytest.fixture
def replayer() -> Replayer:
    return Replayer(find_card("rtx3090"), AllocatorSettings(), (2, 13))


@pytest.mark.parametrize(("release", "taken_from"), [((2, 11), "lower"), ((2, 13), "older")])
def test_the_release_decides_among_equal_free_blocks(release: tuple[int, int], taken_from: str) -> None:
    """Of 40 MiB behind a block in use in the older segment, and 40 MiB of a whole one, which lies below it."""
    sizes = (12 * MIB, 40 * MIB, 52 * MIB, 40 * MIB, 30 * MIB, Workspace("empty_cache", (EMPTY_CACHE,)))
    events = (2, ~2, 0, 1, 3, ~1, ~3, 4, 5, ~5)
    trace = Trace(parts=(1,), events=events, sizes=sizes, phases=((0, "forward"),), last_update=0)
    replayer = Replayer(find_card("rtx3090"), AllocatorSettings(), release)
    left = replayer.with_sizes(trace).reserved_over_time(replayer.settings)[len(events) - 1]
    assert left == {"lower": 52 + 40, "older": 52}[taken_from] * MIB


@pytest.mark.parametrize(("size", "left"), [(EMPTY_CACHE, 0), (EMPTY_CACHE_ONCE, 30)])
def test_what_an_update_empties_once_is_not_emptied_when_it_is_repeated(size: int, left: int) -> None:
    sizes, events = (30 * MIB, Workspace("empty_cache", (size,))), (0, ~0, 1, ~1)
    trace = Trace(parts=(1,), events=events, sizes=sizes, phases=((0, "forward"),), last_update=0)
    sized = Replayer(find_card("rtx3090"), AllocatorSettings(), (2, 13)).with_sizes(trace)
    assert sized.reserved_over_time()[-1] == left * MIB


def test_a_trial_repeats_updates_until_they_settle(replayer: Replayer) -> None:
    def update(*sizes: int, events: tuple[int, ...]) -> Trace:
        return Trace(
            parts=(1,),
            events=events,
            sizes=sizes,
            phases=((0, "forward"), (2, "backward"), (3, "update")),
            last_update=1,
        )

    once = update(21 * MIB, 21 * MIB, 30 * MIB, events=(0, 1, ~0, 2, ~2))
    assert (predict_trial(replayer, [once], 60 * MIB).outcome, replayer.replay(once, 60 * MIB)[2].retries) == ("ok", 2)
    always = update(2 * MIB, 30 * MIB, 40 * MIB, events=(0, 1, ~1, 2, ~2))
    assert predict_trial(replayer, [always], 65 * MIB).outcome == "ok", "40 MiB serve both once they are there"
    later = update(30 * MIB, 11 * MIB, 30 * MIB, 40 * MIB, events=(0, 1, 2, ~0, ~1, 3, ~3))
    failed = predict_trial(replayer, [later], 100 * MIB)
    assert (failed.outcome, failed.phase) == ("oom", "backward")
    assert [replayer.with_sizes(later).phase_at(event) for event in (6, 7, 8)] == ["update", "forward", "backward"]


@given(st.lists(st.integers(0, 1 << 25), min_size=1, max_size=20), st.data())
def test_the_largest_reserved_bytes_are_the_peak_of_a_replay(sizes: list[int], data: st.DataObject) -> None:
    events: list[int] = []
    for block in range(len(sizes)):
        events.append(block)
        alive = sorted(set(events) - {~event for event in events if event < 0} - {e for e in events if e < 0})
        events.extend(~block for block in data.draw(st.lists(st.sampled_from(alive), unique=True, max_size=2)))
    start = data.draw(st.integers(0, len(events)))
    trace = sized(events, sizes, start)
    held = trace.reserved_over_time()
    assert len(held) == len(events)
    assert max(held) == trace.replay().peak_reserved_bytes


def test_a_block_is_used_again_on_its_own_stream_only() -> None:
    events, sizes = (0, ~0, 1, ~1), (30 * MIB, 30 * MIB)
    assert sized(events, sizes).replay().peak_reserved_bytes == 30 * MIB
    apart = sized(events, sizes, streams=(0, 1))
    assert apart.replay().peak_reserved_bytes == apart.reserved_over_time()[-1] == 60 * MIB
    assert apart.least_capacity() == 30 * MIB
    tight = sized(events, sizes, streams=(1, 0)).replay(capacity=30 * MIB)
    assert (tight.fits, tight.retries) == (True, 1), "what another stream has cached is released"
    assert sized((0, 1, ~0), (8, 8), 1, streams=(0, 1)).replacements is None
