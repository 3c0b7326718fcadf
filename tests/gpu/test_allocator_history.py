"""A history as a card records it becomes requests, and what is replayed otherwise is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from allocator_requests import MIB, make_requests
from recording_card import FAR, START, RecordingCard
from reference_allocator import NoRoom

from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from tests.gpu.history import Request, compare_history, number_blocks, replay_requests, translate

TOTAL = 1000 * MIB
PLAIN = AllocatorSettings().for_card(TOTAL)
SHARE = AllocatorSettings(memory_fraction=0.25).for_card(TOTAL)


def entry(action: str, addr: int = 0, size: int = 0, **other: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 12, **other}


def record(
    settings: AllocatorSettings, seed: int = 3, place: Callable[[int], int] = lambda n: START + n * FAR
) -> dict[str, Any]:
    """As `recorded_run` has it, of a card that was asked for the usual requests."""
    card, alive = RecordingCard(settings, place), set[int]()
    for block, size in make_requests(seed):
        if size is None:
            if block in alive:
                card.free(block)
                alive.remove(block)
            continue
        try:
            card.malloc(block, size)
            alive.add(block)
        except NoRoom:
            pass
    snapshot = card.snapshot()
    return {
        "entries": snapshot["device_traces"][0],
        "segments": snapshot["segments"],
        "statistics": card.statistics(),
    }


def test_translation() -> None:
    entries = [
        entry("segment_alloc", 0x100000, 2 * MIB, frames=[{"filename": "a.py", "line": 3, "name": "f"}]),
        entry("alloc", 0x100000, 700, user_metadata="forward"),
        entry("snapshot"),
        entry("free_requested", 0x100000, 700),
        entry("segment_free", 0x900000, 20 * MIB),
        entry("segment_alloc", 0x900000, 22 * MIB),
        entry("alloc", 0x900000, 21 * MIB, stream=7),
        entry("free_completed", 0x100000, 700),
        entry("segment_free", 0x100000, 2 * MIB),
        {"action": "oom", "size": 90 * MIB, "device_free": 5, "stream": 0},
        entry("segment_free", 0x300000, 4 * MIB),
    ]
    assert translate(entries) == [
        Request("alloc", 0x100000, 700, (2 * MIB,), (0x100000,)),
        Request("alloc", 0x900000, 21 * MIB, (-20 * MIB, 22 * MIB), (0x900000,)),
        Request("free", 0x100000, 700),
        Request("oom", 0, 90 * MIB, (-2 * MIB,)),
        Request("empty", moved=(-4 * MIB,)),
    ]
    assert number_blocks(entries) == ([0, 1, ~0], [700, 21 * MIB])


@pytest.mark.parametrize("settings", [PLAIN, SHARE])
@pytest.mark.parametrize("seed", range(3))
def test_a_card_that_does_the_same_is_exact(settings: AllocatorSettings, seed: int) -> None:
    row = compare_history(record(settings, seed), settings)
    assert (row["exact"], row["difference"], row["difference_in_order"]) == (True, None, None)
    assert row["requests"] > 400
    assert row["segments"] > 5
    assert row["same_blocks_at_the_end"]


def test_addresses_that_are_out_of_order_are_followed() -> None:
    recorded = record(PLAIN, place=lambda n: START + FAR * ((n * 37) % 101))
    row = compare_history(recorded, PLAIN)
    assert row["exact"]


@pytest.mark.parametrize(
    ("action", "change", "what"),
    [
        ("segment_alloc", {"size": 22 * MIB}, "moved_bytes"),
        ("alloc", {"addr": 512}, "address"),
    ],
)
def test_a_planted_difference_is_found_where_it_is(action: str, change: dict[str, int], what: str) -> None:
    recorded = copy.deepcopy(record(PLAIN))
    where = [number for number, entry in enumerate(recorded["entries"]) if entry["action"] == action][3]
    before = len(translate(recorded["entries"][:where]))
    recorded["entries"][where].update(change)
    difference = replay_requests(translate(recorded["entries"]), PLAIN, placed=True).difference
    assert difference is not None
    assert (difference["index"], difference["what"]) == (before, what)


def test_a_record_that_begins_too_late_is_refused() -> None:
    with pytest.raises(ValueError, match="record from the start"):
        compare_history({"entries": [entry("free_completed", 64, 5)], "segments": [], "statistics": {}}, PLAIN)


def test_expandable_segments_are_compared_by_what_they_hold() -> None:
    settings = AllocatorSettings(expandable_segments=True).for_card(TOTAL)
    entries = [
        entry("segment_map", START, 20 * MIB),
        entry("segment_map", START + 20 * MIB, 20 * MIB),
        entry("alloc", START, 30 * MIB),
        entry("free_completed", START, 30 * MIB),
        entry("alloc", START, 5 * MIB),
    ]
    statistics = {"allocated_bytes.all.current": 5 * MIB, "allocated_bytes.all.peak": 30 * MIB}
    statistics |= {"reserved_bytes.all.current": 40 * MIB, "reserved_bytes.all.peak": 40 * MIB, "num_alloc_retries": 0}
    row = compare_history({"entries": entries, "segments": [], "statistics": statistics}, settings)
    assert row["exact"], row
