"""CUDACachingAllocator, replayed: what PyTorch reserves on a card, and what still fits.

Every rule is that of the function named with it in PyTorch's `c10/cuda/CUDACachingAllocator.cpp`, the same from torch
2.11 to 2.15, for one stream and no captured graphs: the libraries of both releases do the same, request by request
(tests/devices/simulated/test_allocator_recorded.py). What only CUDA decides is assumed: segments lie in memory in the
order they were asked for, and a capacity is used to its last byte.
"""

from __future__ import annotations

from typing import Final

from autoaccum.devices.simulated.allocator.blocks import Block, BlockPool, ExpandableSegments
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.errors import DoesNotFitError
from autoaccum.units import MIB, format_bytes

SMALL_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_GRAIN_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
_LARGE_ALONE_BYTES: Final = 10 * MIB
_LEAST_BYTES: Final = 512
_NO_LIMIT: Final = 1 << 60
_ADDRESSES_WITHOUT_CARD: Final = 1 << 45


class CudaOutOfMemory(DoesNotFitError):
    """Not even giving back all that is cached made room for what was asked for."""

    def __init__(self, asked_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{format_bytes(asked_bytes)} more are asked for when {format_bytes(reserved_bytes)} of "
            f"{format_bytes(limit_bytes)} are reserved",
            hint="try a smaller micro-batch",
        )
        self.asked_bytes, self.reserved_bytes = asked_bytes, reserved_bytes


class CachingAllocator:
    """Gives out blocks of segments, and keeps what is freed for the next who asks.

    Of the card there are `capacity` bytes for segments; None: any number.

    Attributes:
        allocated_bytes, peak_allocated_bytes: In blocks that are given out, each as large as it is.
        reserved_bytes, peak_reserved_bytes: In segments, or handles of expandable ones.
        retries: PyTorch's `num_alloc_retries`: how often all that was cached was given back, and CUDA asked again.
        releases: How often something that was cached was given back before CUDA was asked, for that or another reason.
        segments: How often CUDA was asked with success (`num_device_alloc`).
        least_refused_bytes: The least capacity at which something would have been granted that was not; None when the
            capacity denied nothing. At any from `peak_reserved_bytes` to below that, all would have gone the same way.
    """

    def __init__(self, capacity: int | None = None, settings: AllocatorSettings | None = None) -> None:
        settings = settings or AllocatorSettings()
        self._settings, self._expandable = settings, settings.expandable_segments
        self._capacity = _NO_LIMIT if capacity is None else capacity
        self._allowed = _NO_LIMIT if settings.allowed_bytes is None else settings.allowed_bytes
        self._max_split = _NO_LIMIT if settings.max_split_bytes is None else settings.max_split_bytes
        self._small, self._large = BlockPool(small=True), BlockPool(small=False)
        self._handles = {pool: self._handles_of(pool) for pool in (self._small, self._large)}
        self._next_address = self._given_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = self.releases = self.segments = 0
        self.least_refused_bytes: int | None = None

    def malloc(self, size: int) -> Block:
        """A block of at least `size` bytes (`malloc`)."""
        asked, size = size, self._round(size)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._find(pool, size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._ask(pool, size)
            if block is None:
                raise CudaOutOfMemory(asked, self.reserved_bytes, min(self._capacity, self._allowed))
        rest = block.size - size
        if rest >= _LEAST_BYTES and (
            pool.small or self._expandable or (rest > SMALL_BYTES and size < self._max_split)
        ):  # `should_split`
            pool.insert(block.cut(size))
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours (`free_block`)."""
        self.allocated_bytes -= block.size
        block.allocated = False
        block.merge()
        block.pool.insert(block)

    def _round(self, size: int) -> int:
        """`round_size`: up to 512 bytes, or to a step between two powers of two."""
        divisions, step = self._settings.roundup_divisions, _LEAST_BYTES
        if divisions > 1 and size > _LEAST_BYTES * divisions:
            step = (1 << size.bit_length() - 1) // divisions
        return -(-size // step) * step

    def _find(self, pool: BlockPool, size: int) -> Block | None:
        """`get_free_block`: the best fit, unless it is too large to be split and too large for what is asked."""
        block = self._handles[pool].best(size) if self._expandable else pool.best(size)
        if block is None or block.size < self._max_split:
            return block
        if size < self._max_split or block.size >= size + LARGE_SEGMENT_BYTES:
            return None
        return block

    def _ask(self, pool: BlockPool, size: int) -> Block | None:
        """The second half of `malloc`: CUDA, then giving back as little as will do, then giving back everything."""
        given_bytes = self._given_bytes
        block = self._grow(pool, size)
        if block is None and self._release_enough(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self._release_all()
            self.retries += 1
            block = self._grow(pool, size)
        self.releases += self._given_bytes > given_bytes
        return block

    def _grow(self, pool: BlockPool, size: int) -> Block | None:
        """`alloc_block`: a segment from CUDA."""
        segment_bytes = self._segment_bytes(size)
        if self.reserved_bytes + segment_bytes > self._allowed:
            return None
        if self._expandable:
            return self._handles[pool].grow(size)
        return Block(pool, self._place(segment_bytes), segment_bytes) if self._take(segment_bytes) else None

    def _segment_bytes(self, size: int) -> int:
        """`get_allocation_size`."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < _LARGE_ALONE_BYTES:
            return LARGE_SEGMENT_BYTES
        return -(-size // LARGE_GRAIN_BYTES) * LARGE_GRAIN_BYTES

    def _release_enough(self, pool: BlockPool, size: int) -> bool:
        """`release_available_cached_blocks`: too large to be split, they would lie about; the largest first."""
        if self._expandable or self._settings.max_split_bytes is None:
            return False
        wanted, released = max(size, self._max_split), 0
        block = pool.best(wanted)
        if block is not None:
            self._release(block)
            return True
        for block in reversed(pool.free()):
            if released >= wanted or block.size < self._max_split:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _release_all(self) -> None:
        """`release_cached_blocks`: every segment, or handle, that is wholly free."""
        for pool in (self._large, self._small):
            if self._expandable:
                self._handles[pool].release()
                continue
            for block in pool.free():
                if not block.split:
                    self._release(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._give(block.size)

    def _take(self, size: int) -> bool:
        wanted = self.reserved_bytes + size
        if wanted > self._capacity:
            self.least_refused_bytes = (
                wanted if self.least_refused_bytes is None else min(self.least_refused_bytes, wanted)
            )
            return False
        self.segments += 1
        self.reserved_bytes = wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, wanted)
        return True

    def _give(self, size: int) -> None:
        self.reserved_bytes -= size
        self._given_bytes += size

    def _place(self, size: int) -> int:
        address, self._next_address = self._next_address, self._next_address + size
        return address

    def _handles_of(self, pool: BlockPool) -> ExpandableSegments:
        total_bytes = self._settings.total_bytes
        return ExpandableSegments(
            pool,
            handle_bytes=SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES,
            # As many addresses as the card has, and an eighth more, so that some may stay without memory.
            address_bytes=_ADDRESSES_WITHOUT_CARD if total_bytes is None else total_bytes + total_bytes // 8,
            place=self._place,
            take=self._take,
            give=self._give,
        )
