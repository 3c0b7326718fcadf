"""The allocator: a rule of CUDACachingAllocator by a known answer, its invariants, and settings of the environment."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.errors import UsageError
from autoaccum.simulation.allocator.blocks import Block
from autoaccum.simulation.allocator.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    CudaOutOfMemoryError,
    read_settings,
)
from autoaccum.units import KIB, MIB

SIZES = [1, 512, 513, 100 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB, 9 * MIB + 7, 10 * MIB, 21 * MIB, 22 * MIB - 512]
ALL_SETTINGS: list[dict[str, Any]] = [
    {},
    {"expandable_segments": True},
    {"max_split_bytes": 20 * MIB},
    {"roundup_divisions": 4},
    {"by_address": True},
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


def test_a_lower_capacity_keeps_the_segments_that_are_there() -> None:
    """`setMemoryFraction`."""
    made = CachingAllocator(100 * MIB)
    made.free(made.malloc(40 * MIB))
    made.set_capacity(30 * MIB)
    made.malloc(40 * MIB)
    with pytest.raises(CudaOutOfMemoryError):
        made.malloc(20 * MIB)


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


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        (" expandable_segments : True , ", {"expandable_segments": True}),
        ("max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),
        ("max_split_size_mb:128MB", {"max_split_bytes": 128 * MIB}),
        ("roundup_power2_divisions:8", {"roundup_divisions": 8}),
        ("pinned_use_cuda_host_register:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True", {}),
        ("garbage_collection_threshold:0.8,max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),
    ],
)
def test_settings_are_read_as_torch_reads_them(text: str, changed: dict[str, Any]) -> None:
    assert read_settings({"PYTORCH_ALLOC_CONF": text}) == AllocatorSettings(**changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend:cudaMallocAsync", "has backend:cudaMallocAsync, which is not simulated"),
        ("max_split:3", "PYTORCH_ALLOC_CONF has max_split:3, which is not simulated"),
        ("expandable_segments:true", "torch accepts only True and False"),
        ("max_split_size_mb:19", "at least 20: leave that key out, or give a value that torch accepts"),
        ("per_process_memory_fraction:0.5", "which is not simulated"),
        ("roundup_power2_divisions:[1:2,>:4]", "only one power of two for all sizes"),
    ],
)
def test_invalid_and_unsupported_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_settings({"PYTORCH_ALLOC_CONF": text})


def test_the_older_variable_wins_even_when_empty() -> None:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    both = {new: "expandable_segments:True", old: "max_split_size_mb:40"}
    assert read_settings(both) == AllocatorSettings(max_split_bytes=40 * MIB)
    assert read_settings({new: "expandable_segments:True", old: ""}) == AllocatorSettings()
    with pytest.raises(UsageError, match=old):
        read_settings({old: "nonsense:1"})


def test_an_allocator_without_its_cache_is_not_simulated() -> None:
    with pytest.raises(UsageError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set, .*: unset it to plan"):
        read_settings({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"})
