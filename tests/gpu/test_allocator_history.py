"""A history as a card records it becomes requests, and what is replayed otherwise is found."""

from __future__ import annotations

from typing import Any

import pytest
from allocator_requests import MIB

from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from tests.gpu.history import Request, compare_history, number_blocks, translate

TOTAL = 1000 * MIB
PLAIN = AllocatorSettings().for_card(TOTAL)
START = 0x7F_0000_0000_00


def entry(action: str, addr: int = 0, size: int = 0, **other: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 12, **other}


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


def test_addresses_that_are_out_of_order_are_followed() -> None:
    """Of two free blocks of one size, the lower is taken, though its segment is the younger."""
    size, lower = 20 * MIB, START - 100 * MIB
    entries = [entry(action, address, size) for address in (START, lower) for action in ("segment_alloc", "alloc")]
    entries += [entry("free_completed", START, size), entry("free_completed", lower, size), entry("alloc", lower, size)]
    statistics = {"allocated_bytes.all.current": size, "allocated_bytes.all.peak": 2 * size}
    statistics |= {"reserved_bytes.all.current": 2 * size, "reserved_bytes.all.peak": 2 * size, "num_alloc_retries": 0}
    blocks = [(lower, "active_allocated"), (START, "inactive")]
    segments = [{"blocks": [{"address": address, "size": size, "state": state} for address, state in blocks]}]
    assert compare_history({"entries": entries, "segments": segments, "statistics": statistics}, PLAIN)["exact"]
    entries[-1]["addr"] = START
    assert compare_history({"entries": entries, "segments": segments, "statistics": statistics}, PLAIN)["difference"]
