"""The allocator: a rule of CUDACachingAllocator by a known answer, and its invariants."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings, CachingAllocator, CudaOutOfMemoryError
from autoaccum.units import KIB, MIB

SIZES = [1, 512, 513, 100 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB, 9 * MIB + 7, 10 * MIB, 21 * MIB, 22 * MIB - 512]
ALL_SETTINGS: list[dict[str, Any]] = [
    {},
    {"expandable_segments": True},
    {"max_split_bytes": 20 * MIB},
    {"roundup_divisions": 4},
]


def test_cached_memory_is_released_only_without_other_room() -> None:
    """`malloc`, `release_cached_blocks`: all that is wholly free, of both pools; then once more."""
    made = CachingAllocator(100 * MIB)
    small, held = made.malloc(100), made.malloc(20 * MIB)
    for size in (30, 40):
        made.free(made.malloc(size * MIB))
    made.free(small)
    assert (made.reserved_bytes, made.retries) == (92 * MIB, 0)
    made.malloc(50 * MIB)
    assert (made.reserved_bytes, made.retries, made.releases) == (70 * MIB, 1, 1)
    assert made.allocated_bytes == 50 * MIB + held.size
    assert made.least_refused_bytes == 142 * MIB


# --- invariants -----------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.booleans(), st.sampled_from(SIZES), st.integers(0, 30)), max_size=60)
capacities = st.one_of(st.none(), st.integers(1, 100).map(lambda count: count * 2 * MIB))
kinds = st.sampled_from(ALL_SETTINGS).map(lambda kind: AllocatorSettings(**kind))


def check(made: CachingAllocator, live: list[Block], capacity: int | None) -> None:
    free = [block for pool in (made._small, made._large) for block in (*pool.free_blocks(), *pool.unmapped_blocks())]
    blocks = sorted([*live, *free], key=lambda block: block.address)
    for one, other in zip(blocks, blocks[1:], strict=False):
        assert one.address + one.size <= other.address, "no two blocks overlap"
    for block in blocks:
        if block.next is not None:
            assert block.next.prev is block
            assert block.address + block.size == block.next.address, "a segment has no gaps"
            joinable = not (block.allocated or block.next.allocated) and block.mapped == block.next.mapped
            assert not joinable, "free neighbours are joined"
    held = sum(block.size for block in blocks if block.mapped)
    assert held == made.reserved_bytes <= made.peak_reserved_bytes
    assert made.allocated_bytes == sum(block.size for block in live) <= made.reserved_bytes
    assert capacity is None or made.peak_reserved_bytes <= capacity


@settings(max_examples=count_examples(150), deadline=None)
@given(steps=steps, capacity=capacities, kind=kinds)
def test_nothing_overlaps_and_nothing_is_lost(
    steps: list[tuple[bool, int, int]], capacity: int | None, kind: AllocatorSettings
) -> None:
    made, live = CachingAllocator(capacity, kind), list[Block]()
    for takes, size, index in steps:
        if not takes and live:
            made.free(live.pop(index % len(live)))
        else:
            with suppress(CudaOutOfMemoryError):
                live.append(made.malloc(size))
                assert live[-1].size >= size
        check(made, live, capacity)
    for block in live:
        made.free(block)
    check(made, [], capacity)
    made.release_cached_blocks()
    assert made.reserved_bytes == made.allocated_bytes == 0, "everything can be released"
