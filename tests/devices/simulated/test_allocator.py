"""The allocator: each rule of CUDACachingAllocator by a known answer, its invariants, and a slow model beside it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_allocator import NoRoom, Reference

from autoaccum.devices.simulated.allocator import Allocator, CapacityExceeded
from autoaccum.devices.simulated.allocator_blocks import Block
from autoaccum.devices.simulated.allocator_settings import AllocatorSettings, read_settings
from autoaccum.units import KIB, MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)
SIZES = [1, 512, 513, 100 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB, 9 * MIB + 7, 10 * MIB, 21 * MIB, 22 * MIB - 512]
ALL_SETTINGS: list[dict[str, Any]] = [
    {},
    {"expandable_segments": True},
    {"expandable_segments": True, "large_segment_bytes": 12 * MIB},
    {"large_segment_bytes": 32 * MIB},
    {"max_split_bytes": 20 * MIB},
    {"max_split_bytes": 21 * MIB, "max_unsplit_rounding_bytes": 22 * MIB},
    {"roundup_divisions": (2, 4, 8, 4, 2) + (0,) * 11},
    {"memory_fraction": 0.5, "garbage_collection_threshold": 0.6, "total_bytes": 400 * MIB},
    {"memory_fraction": 0.5, "expandable_segments": True, "total_bytes": 300 * MIB},
]


def configuration(env: str) -> AllocatorSettings:
    return read_settings({"PYTORCH_CUDA_ALLOC_CONF": env})


# --- the rules, one by one (functions of c10/cuda/CUDACachingAllocator.cpp) -----------------------------------------


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (31 * MIB, 32 * MIB, 32 * MIB),
    ],
)
def test_rounds_and_asks_for_segments(asked: int, block: int, segment: int) -> None:
    """`round_size`, `get_allocation_size`; a rest of up to 1 MiB stays with a large block."""
    made = Allocator()
    assert made.malloc(asked).size == made.allocated_bytes == block
    assert (made.reserved_bytes, made.segments) == (segment, 1)


def test_what_is_freed_joins_its_neighbours_of_the_same_segment_only() -> None:
    """`try_merge_blocks`."""
    made = Allocator()
    blocks = [made.malloc(4 * MIB) for _ in range(10)]
    assert made.reserved_bytes == 40 * MIB
    for block in blocks:
        made.free(block)
    assert [block.size for block in made._large.free()] == [20 * MIB, 20 * MIB]
    made.malloc(40 * MIB)
    assert made.reserved_bytes == 80 * MIB


def test_what_is_cached_is_given_back_only_when_there_is_no_room() -> None:
    """`malloc`, `release_cached_blocks`: all that is wholly free, of both pools; then once more."""
    made = Allocator(100 * MIB)
    small, held = made.malloc(100), made.malloc(20 * MIB)
    for size in (30, 40):
        made.free(made.malloc(size * MIB))
    made.free(small)
    assert (made.reserved_bytes, made.retries) == (92 * MIB, 0)
    made.malloc(50 * MIB)
    assert (made.reserved_bytes, made.retries, made.releases) == (70 * MIB, 1, 1)
    assert made.allocated_bytes == 50 * MIB + held.size
    assert made.denied_bytes == 142 * MIB


# --- what settings change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divisions", "asked", "rounded"),
    [
        ("4", 1200 * KIB, 1280 * KIB),
        ("4", 1280 * KIB, 1280 * KIB),
        ("8", 33 * MIB, 36 * MIB),
        ("4", 2048, 2048),
        ("4", 2049, 2560),
        ("[1:4,>:8]", 33 * MIB, 36 * MIB),
        ("[32:2,>:8]", 33 * MIB, 48 * MIB),
        ("[64:2,>:8]", 33 * MIB, 48 * MIB),
        ("[16:2,>:1]", 33 * MIB, 34 * MIB),
    ],
)
def test_sizes_round_up_to_steps_between_powers_of_two(divisions: str, asked: int, rounded: int) -> None:
    """`roundup_power2_next_division`; intervals of `AcceleratorAllocatorConfig::roundup_power2_divisions`."""
    made = Allocator(settings=configuration(f"roundup_power2_divisions:{divisions}"))
    assert made.malloc(asked).size == rounded


def test_oversize_blocks_are_not_split_and_serve_only_their_like() -> None:
    """`should_split`, `get_free_block` with max_split_size_mb."""
    made = Allocator(settings=configuration("max_split_size_mb:40"))
    made.free(made.malloc(60 * MIB))
    made.malloc(30 * MIB)
    assert made.reserved_bytes == 90 * MIB, "less than the limit does not take an oversize block"
    assert made.malloc(41 * MIB).size == 60 * MIB, "an oversize one takes up to 20 MiB more than it asks for"
    made = Allocator(settings=configuration("max_split_size_mb:40"))
    made.free(made.malloc(60 * MIB))
    made.malloc(40 * MIB)
    assert made.reserved_bytes == 100 * MIB, "20 MiB more are too many"


def test_a_share_of_the_card_is_a_limit_by_segments() -> None:
    """`setMemoryFraction`, `alloc_block`."""
    settings = configuration("per_process_memory_fraction:0.5").for_card(100 * MIB)
    made = Allocator(90 * MIB, settings)
    made.malloc(30 * MIB)
    made.malloc(5 * MIB)
    with pytest.raises(CapacityExceeded):
        made.malloc(1)


def test_old_segments_are_collected_above_the_threshold() -> None:
    """`garbage_collect_cached_blocks`: those not used for at least as long as the mean."""
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"
    made = Allocator(settings=configuration(text).for_card(200 * MIB))
    old, new = made.malloc(40 * MIB), made.malloc(50 * MIB)
    made.free(old)
    for _ in range(3):
        made.free(made.malloc(10 * MIB))
    made.free(new)
    made.malloc(60 * MIB)
    assert made.retries == 0
    assert made.reserved_bytes == 150 * MIB, "nothing is collected at 90 MiB, the threshold"
    made.malloc(22 * MIB)
    made.malloc(30 * MIB)
    assert made.releases == 0, "what lay in the cache was used"


# --- expandable segments --------------------------------------------------------------------------------------------


def test_an_expandable_segment_grows_by_handles() -> None:
    """`try_allocate_expandable_block`, `map_block`."""
    made = Allocator(settings=EXPANDABLE)
    first, second = made.malloc(30 * MIB), made.malloc(15 * MIB)
    assert (first.size, second.size, made.reserved_bytes) == (30 * MIB, 15 * MIB, 60 * MIB)
    assert second.address == first.address + first.size
    made.malloc(100)
    assert made.reserved_bytes == 62 * MIB, "2 MiB handles of small blocks"


def test_a_freed_tail_grows_where_fixed_segments_would_be_asked_anew() -> None:
    growing, fixed = Allocator(settings=EXPANDABLE), Allocator()
    for made in (growing, fixed):
        for size in (40, 60, 80):
            made.free(made.malloc(size * MIB))
    assert (growing.reserved_bytes, fixed.reserved_bytes) == (80 * MIB, 180 * MIB)


def test_handles_that_are_wholly_free_are_unmapped_when_there_is_no_room() -> None:
    """`unmap_block`: handles in part use stay, and their addresses are filled again later."""
    made = Allocator(100 * MIB, EXPANDABLE)
    hole, end = made.malloc(50 * MIB), made.malloc(50 * MIB)
    made.free(hole)
    large = made.malloc(40 * MIB)
    assert (large.address, made.reserved_bytes, made.retries) == (hole.address, 100 * MIB, 0)
    made.free(large)
    made.malloc(52 * MIB - 12 * MIB)
    made.free(end)
    made.malloc(60 * MIB)
    assert (made.reserved_bytes, made.retries) == (100 * MIB, 0)


def test_a_share_is_tested_by_the_size_of_a_fixed_segment() -> None:
    """`alloc_block` looks at what a fixed segment would take, whatever is going to be mapped."""
    settings = AllocatorSettings(expandable_segments=True, memory_fraction=0.5, total_bytes=200 * MIB)
    made = Allocator(settings=settings)
    made.malloc(60 * MIB)
    assert made.malloc(38 * MIB).size == 38 * MIB, "two handles: 100 MiB of 100"
    made = Allocator(settings=settings)
    made.malloc(70 * MIB)
    assert made.malloc(10 * MIB).size == 10 * MIB
    with pytest.raises(CapacityExceeded):
        made.malloc(22 * MIB)


# --- invariants -----------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES), st.integers(0, 30)), max_size=60)
capacities = st.one_of(st.none(), st.integers(1, 100).map(lambda count: count * 2 * MIB))
kinds = st.sampled_from(ALL_SETTINGS).map(lambda kind: AllocatorSettings(**kind))


def check(made: Allocator, live: list[Block], capacity: int | None) -> None:
    free = [block for pool in (made._small, made._large) for block in (*pool.free(), *pool.unmapped())]
    blocks = sorted([*live, *free], key=lambda block: block.address)
    for one, other in zip(blocks, blocks[1:], strict=False):
        assert one.address + one.size <= other.address, "no two blocks overlap"
    for block in blocks:
        if block.behind is not None:
            assert block.behind.before is block
            assert block.address + block.size == block.behind.address, "a segment has no gaps"
            joinable = not (block.allocated or block.behind.allocated) and block.mapped == block.behind.mapped
            assert not joinable, "free neighbours are joined"
    held = sum(block.size for block in blocks if block.mapped)
    assert held == made.reserved_bytes <= made.peak_reserved_bytes
    assert made.allocated_bytes == sum(block.size for block in live) <= made.reserved_bytes
    assert capacity is None or made.peak_reserved_bytes <= capacity


@settings(max_examples=150, deadline=None)
@given(steps=steps, capacity=capacities, kind=kinds)
def test_nothing_overlaps_and_nothing_is_lost(
    steps: list[tuple[bool, int, int]], capacity: int | None, kind: AllocatorSettings
) -> None:
    made, live = Allocator(capacity, kind), list[Block]()
    for takes, size, index in steps:
        if not takes and live:
            made.free(live.pop(index % len(live)))
        else:
            with suppress(CapacityExceeded):
                live.append(made.malloc(size))
                assert live[-1].size >= size
        check(made, live, capacity)
    for block in live:
        made.free(block)
    check(made, [], capacity)
    made._release_all()
    assert made.reserved_bytes == made.allocated_bytes == 0, "all of it can be given back"


@settings(max_examples=100, deadline=None)
@given(steps=steps)
def test_the_best_fit_is_the_best(steps: list[tuple[bool, int, int]]) -> None:
    made, live = Allocator(), list[Block]()
    for takes, size, index in steps:
        if not takes and live:
            made.free(live.pop(index % len(live)))
            continue
        rounded = -(-size // 512) * 512
        pool = made._small if rounded <= MIB else made._large
        fitting = [(block.size, block.address) for block in pool.free() if block.size >= rounded]
        before = made.segments
        live.append(made.malloc(size))
        if fitting:
            assert (live[-1].address, made.segments) == (min(fitting)[1], before)
        else:
            assert made.segments == before + 1


# --- beside a slow model --------------------------------------------------------------------------------------------


def compare(steps: list[tuple[bool, int, int]], capacity: int | None, kind: AllocatorSettings) -> None:
    fast, slow = Allocator(capacity, kind), Reference(capacity, kind)
    live: dict[int, Block] = {}
    for number, (takes, size, index) in enumerate(steps):
        if not takes and live:
            block = list(live)[index % len(live)]
            fast.free(live.pop(block))
            slow.free(block)
        else:
            try:
                live[number] = fast.malloc(size)
            except CapacityExceeded:
                with pytest.raises(NoRoom):
                    slow.malloc(number, size)
            else:
                slow.malloc(number, size)
        assert (fast.reserved_bytes, fast.allocated_bytes, fast.retries) == (
            slow.reserved,
            slow.allocated,
            slow.retries,
        )
        assert (fast.peak_reserved_bytes, fast.peak_allocated_bytes) == (slow.peak_reserved, slow.peak_allocated)


@settings(max_examples=300, deadline=None)
@given(steps=steps, capacity=capacities, kind=kinds)
def test_a_slow_model_does_the_same(
    steps: list[tuple[bool, int, int]], capacity: int | None, kind: AllocatorSettings
) -> None:
    compare(steps, capacity, kind)
