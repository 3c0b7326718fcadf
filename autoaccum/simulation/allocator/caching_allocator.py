"""PyTorch's CUDACachingAllocator in Python: the memory that PyTorch reserves on a card, and whether a request fits.

Each method has the name of, or names, its original in c10/cuda/CUDACachingAllocator.cpp. The libraries of torch 2.9
to 2.11 and 2.13 to 2.15 do the same, request by request, without captured graphs
(tests/simulation/allocator/test_real_allocator.py). A free block is used again on the stream that it was made on only:
the original orders the free blocks of all streams by stream first, and so a stream has pools of its own here. A
capacity is assumed to be usable to its last byte.

From 2.13 on, the oldest segment comes first among free blocks of equal size, so that addresses ascend here in the order
of allocation; before, the lowest address did (`AllocatorSettings.by_address`). 2.12, which numbers the blocks one by
one, is taken for 2.11: its library reserves as much for eight of nine traces of language models, 13 % less for one.

Settings have the syntax and the bounds of c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp:
`key:value,key:value`, with spaces anywhere, and `True` and `False` in this spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from autoaccum.errors import UsageError
from autoaccum.simulation.allocator.addresses import SegmentAddresses
from autoaccum.simulation.allocator.blocks import Block, BlockPool, ExpandableSegments
from autoaccum.units import MIB, format_bytes

SMALL_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_GRAIN_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
_LARGE_ALONE_BYTES: Final = 10 * MIB
MIN_BLOCK_BYTES: Final = 512
_NO_LIMIT: Final = 1 << 60
_ADDRESSES_WITHOUT_CARD: Final = 1 << 45

_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_LEAST_SPLIT_MIB: Final = 20
_WITHOUT_EFFECT: Final = ("release_lock_on_", "graph_capture_", "pinned_", "garbage_collection_threshold")
"""Prefixes of keys for host memory, locks, captured graphs, and what only a limit of the process makes work."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings that decide how PyTorch's allocator rounds, splits and grows.

    Attributes:
        expandable_segments: True if a pool grows by mapping memory, instead of by segments of fixed size.
        max_split_bytes: Blocks of this size and more are not split; None splits all.
        roundup_divisions: The steps between two powers of two to which sizes are rounded; 0 or 1 for none.
        total_bytes: The memory of the card, by which expandable segments reserve addresses; None: more than enough.
        by_address: True if addresses as those of `SegmentAddresses` decide among free blocks of the same size.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: int = 0
    total_bytes: int | None = None
    by_address: bool = False


def read_settings(environment: Mapping[str, str], total_bytes: int | None = None) -> AllocatorSettings:
    """Read the settings of the environment as torch does, for a card of `total_bytes`.

    `PYTORCH_CUDA_ALLOC_CONF` wins over `PYTORCH_ALLOC_CONF` if both are set, even if it is empty.

    Raises:
        UsageError: A setting has another form, torch would refuse it, or it is not simulated.

    >>> read_settings({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    True
    """
    if _NO_CACHING in environment:  # Whatever its value: `forceUncachedAllocator` of c10/cuda/CUDACachingAllocator.cpp.
        raise UsageError(
            f"{_NO_CACHING} is set, but only PyTorch's allocator with its cache is simulated", hint="unset it to plan"
        )
    variable = next((name for name in _VARIABLES if name in environment), None)
    changes = {} if variable is None else _read(variable, environment[variable])
    return AllocatorSettings(total_bytes=total_bytes, **changes)


def _read(variable: str, text: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for entry in filter(None, re.split(r",(?![^\[]*\])", "".join(text.split()))):
        key, _, value = entry.partition(":")
        if key.startswith(_WITHOUT_EFFECT) or entry in _AS_SIMULATED:
            continue
        try:
            if key not in _KEYS:
                raise ValueError("which is not simulated")
            name, parse = _KEYS[key]
            changes[name] = parse(value)
        except ValueError as error:
            hint = "leave that key out, or give a value that torch accepts"
            raise UsageError(f"{variable} has {entry}, {error}", hint=hint) from None
    return changes


def _split(value: str) -> int:
    digits = re.match(r"\d+", value)
    if digits is None or int(digits[0]) < _LEAST_SPLIT_MIB:
        raise ValueError(f"but torch requires a number of at least {_LEAST_SPLIT_MIB}")
    return int(digits[0]) * MIB


def _switch(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("but torch accepts only True and False")
    return value == "True"


def _divisions(value: str) -> int:
    number = int(value) if re.fullmatch(r"\d+", value) else 0
    if number < 1 or number & (number - 1):
        raise ValueError("but only one power of two for all sizes is simulated")
    return number


_AS_SIMULATED: Final = ("backend:native", "throw_on_cudamalloc_oom:False")
_KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "max_split_size_mb": ("max_split_bytes", _split),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _switch),
}
"""By key, the setting and the function that reads its value."""


class CudaOutOfMemoryError(Exception):
    """A request does not fit, even after everything cached was released."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(f"{format_bytes(requested_bytes)} more do not fit")
        self.requested_bytes = requested_bytes


class CachingAllocator:
    """Allocates blocks of segments, and caches freed blocks for later requests.

    The card has `capacity` bytes for segments; None is no limit.

    Attributes:
        allocated_bytes, peak_allocated_bytes: The bytes in allocated blocks, rounding included.
        reserved_bytes, peak_reserved_bytes: The bytes in segments, or in handles of expandable segments.
        retries: PyTorch's `num_alloc_retries`: how often everything cached was released to try CUDA once more.
        releases: How many requests released something cached before they tried CUDA again.
        least_refused_bytes: The least capacity at which a refused allocation of CUDA would have succeeded; None if
            none was refused. Any capacity from `peak_reserved_bytes` to below that gives the same result.
    """

    def __init__(self, capacity: int | None = None, settings: AllocatorSettings | None = None) -> None:
        settings = settings or AllocatorSettings()
        self._settings, self._expandable = settings, settings.expandable_segments
        self._capacity = _NO_LIMIT if capacity is None else capacity
        self._max_split = _NO_LIMIT if settings.max_split_bytes is None else settings.max_split_bytes
        self._splits_all = not self._expandable and settings.max_split_bytes is None
        self._divisions = settings.roundup_divisions
        self._addresses = SegmentAddresses() if settings.by_address else None
        self._pools: dict[int, tuple[BlockPool, BlockPool]] = {}
        self._expandable_segments: dict[BlockPool, ExpandableSegments] = {}
        self._small, self._large = self._pools_of(0)
        self._next_address = self._freed_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = self.releases = 0
        self.least_refused_bytes: int | None = None

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Return a block of at least `size` bytes for a stream (`malloc`), of which 0 is the default stream.

        Raises:
            CudaOutOfMemoryError: There is no room for it.
        """
        requested = size
        size = size + MIN_BLOCK_BYTES - 1 & -MIN_BLOCK_BYTES if self._divisions <= 1 else self._round_size(size)
        if stream:
            pool = self._pools_of(stream)[size > SMALL_BYTES]
        else:
            pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.take(size) if self._splits_all else self._take_free_block(pool, size)
        if block is None:
            block = self._allocate_or_release(pool, size)
            if block is None:
                raise CudaOutOfMemoryError(requested)
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES and (
            pool.small or self._expandable or (rest > SMALL_BYTES and size < self._max_split)
        ):  # `should_split`
            pool.split(block, size)
        block.allocated = True
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Free a block and merge it with free neighbours (`free_block`)."""
        self.allocated_bytes -= block.size
        block.allocated = False
        block.pool.give_back(block)

    def set_capacity(self, capacity: int) -> None:
        """Limit the bytes of segments from now on; those that are there stay (`setMemoryFraction`)."""
        self._capacity = capacity

    def _round_size(self, size: int) -> int:
        """Round up to a step between two powers of two, or to a multiple of 512 bytes (`round_size`)."""
        step = MIN_BLOCK_BYTES
        if self._divisions > 1 and size > MIN_BLOCK_BYTES * self._divisions:
            step = (1 << size.bit_length() - 1) // self._divisions
        return -(-size // step) * step

    def _take_free_block(self, pool: BlockPool, size: int) -> Block | None:
        """Take the best fit, unless it is too large to be split and much too large (`get_free_block`)."""
        block = self._expandable_segments[pool].best_fit(size) if self._expandable else pool.best_fit(size)
        if block is None:
            return None
        if block.size >= self._max_split and (size < self._max_split or block.size >= size + LARGE_SEGMENT_BYTES):
            return None
        pool.remove(block)
        return block

    def _allocate_or_release(self, pool: BlockPool, size: int) -> Block | None:
        """Try CUDA; release just enough and try again; release everything and try again (second half of `malloc`)."""
        freed_bytes = self._freed_bytes
        block = self._alloc_block(pool, size)
        if block is None and self._release_available_cached_blocks(pool, size):
            block = self._alloc_block(pool, size)
        if block is None:
            self.release_cached_blocks()
            self.retries += 1
            block = self._alloc_block(pool, size)
        self.releases += self._freed_bytes > freed_bytes
        return block

    def _alloc_block(self, pool: BlockPool, size: int) -> Block | None:
        """Allocate a segment from CUDA (`alloc_block`)."""
        segment_bytes = self._get_allocation_size(size)
        if self._expandable:
            return self._expandable_segments[pool].allocate(size)
        if not self._cuda_malloc(segment_bytes):
            return None
        reserve = self._reserve_addresses if self._addresses is None else self._addresses.reserve
        return Block(pool, reserve(segment_bytes), segment_bytes)

    def _get_allocation_size(self, size: int) -> int:
        """Return the size of the segment for a request (`get_allocation_size`)."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < _LARGE_ALONE_BYTES:
            return LARGE_SEGMENT_BYTES
        return -(-size // LARGE_GRAIN_BYTES) * LARGE_GRAIN_BYTES

    def _release_available_cached_blocks(self, pool: BlockPool, size: int) -> bool:
        """Release blocks too large to be split, the largest first, until a request fits; return whether it does."""
        if self._expandable or self._settings.max_split_bytes is None:
            return False
        wanted, released = max(size, self._max_split), 0
        block = pool.best_fit(wanted)
        if block is not None:
            self._release_block(block)
            return True
        for block in reversed(pool.free_blocks()):
            if released >= wanted or block.size < self._max_split:
                break
            released += block.size
            self._release_block(block)
        return released >= wanted

    def release_cached_blocks(self) -> None:
        """Release every segment, or handle, that is completely free, as `torch.cuda.empty_cache` does."""
        for pool in [pool for small, large in self._pools.values() for pool in (large, small)]:
            if self._expandable:
                self._expandable_segments[pool].release_cached()
                continue
            for block in pool.free_blocks():
                if not block.is_split:
                    self._release_block(block)

    def _release_block(self, block: Block) -> None:
        block.pool.remove(block)
        if self._addresses is not None:
            self._addresses.release(block.address, block.size)
        self._cuda_free(block.size)

    def _cuda_malloc(self, size: int) -> bool:
        wanted = self.reserved_bytes + size
        if wanted > self._capacity:
            least = self.least_refused_bytes
            self.least_refused_bytes = wanted if least is None else min(least, wanted)
            return False
        self.reserved_bytes = wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, wanted)
        return True

    def _cuda_free(self, size: int) -> None:
        self.reserved_bytes -= size
        self._freed_bytes += size

    def _pools_of(self, stream: int) -> tuple[BlockPool, BlockPool]:
        """Return the pools of a stream, for small and for large blocks."""
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = BlockPool(small=True), BlockPool(small=False)
            self._expandable_segments.update((pool, self._expandable_segments_of(pool)) for pool in pools)
        return pools

    def _reserve_addresses(self, size: int) -> int:
        address, self._next_address = self._next_address, self._next_address + size
        return address

    def _expandable_segments_of(self, pool: BlockPool) -> ExpandableSegments:
        total_bytes = self._settings.total_bytes
        return ExpandableSegments(
            pool,
            handle_bytes=SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES,
            # Addresses for all memory of the card and an eighth more, so that some can stay unmapped.
            address_bytes=_ADDRESSES_WITHOUT_CARD if total_bytes is None else total_bytes + total_bytes // 8,
            reserve_addresses=self._reserve_addresses,
            cuda_malloc=self._cuda_malloc,
            cuda_free=self._cuda_free,
        )
