"""Blocks and block pools of PyTorch's caching allocator, and its expandable segments."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Final

_GRAIN_BITS: Final = 9
_SIZE_SHIFT: Final = 55 - _GRAIN_BITS
"""Sizes and addresses are multiples of 512 bytes."""


class Block:
    """A range of addresses in one segment, used or free (`Block` in `c10/cuda/CUDACachingAllocator.cpp`).

    Attributes:
        address: The first byte.
        mapped: False for addresses of an expandable segment that have no memory.
        prev, next: The neighbours in the same segment.
        key: Its place among the free blocks of its pool, while it is one of them.
    """

    __slots__ = ("address", "allocated", "key", "prev", "next", "mapped", "pool", "size")
    key: int

    def __init__(
        self,
        pool: BlockPool,
        address: int,
        size: int,
        prev: Block | None = None,
        following: Block | None = None,
        mapped: bool = True,
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.prev = prev
        self.next = following
        self.allocated = False
        self.mapped = mapped

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment (`is_split`)."""
        return self.prev is not None or self.next is not None


class BlockPool:
    """The free blocks of one pool, ordered by size and address, and its unmapped blocks, ordered by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._unmapped: list[int] = []

    def insert(self, block: Block) -> None:
        """Add a free block."""
        if block.mapped:
            key, keys = block.size << _SIZE_SHIFT | block.address >> _GRAIN_BITS, self._keys
        else:
            key, keys = block.address >> _GRAIN_BITS, self._unmapped
        block.key = key
        self._blocks[key] = block
        insort(keys, key)

    def remove(self, block: Block) -> None:
        """Remove a free block, by the key that it had when it was added."""
        key = block.key
        del self._blocks[key]
        keys = self._keys if block.mapped else self._unmapped
        del keys[bisect_left(keys, key)]

    def give_back(self, block: Block) -> None:
        """Add a free block, merged with free neighbours of the same segment (`try_merge_blocks`)."""
        mapped, size, address, blocks = block.mapped, block.size, block.address, self._blocks
        keys = self._keys if mapped else self._unmapped
        other = block.prev
        if other is not None and not other.allocated and other.mapped == mapped:
            key = other.key
            del blocks[key], keys[bisect_left(keys, key)]
            size += other.size
            block.address = address = other.address
            block.prev = before = other.prev
            if before is not None:
                before.next = block
        other = block.next
        if other is not None and not other.allocated and other.mapped == mapped:
            key = other.key
            del blocks[key], keys[bisect_left(keys, key)]
            size += other.size
            block.next = after = other.next
            if after is not None:
                after.prev = block
        block.size = size
        block.key = key = (size << _SIZE_SHIFT if mapped else 0) | address >> _GRAIN_BITS
        blocks[key] = block
        insort(keys, key)

    def take(self, size: int) -> Block | None:
        """Return the best fit, and remove it."""
        keys = self._keys
        index = bisect_left(keys, size << _SIZE_SHIFT)
        return self._blocks.pop(keys.pop(index)) if index < len(keys) else None

    def split(self, block: Block, size: int) -> Block:
        """Keep the first `size` bytes of a block that is not here, and add the rest, which is returned."""
        following, address, left = block.next, block.address + size, block.size - size
        block.next = rest = Block(self, address, left, block, following, block.mapped)
        if following is not None:
            following.prev = rest
        block.size = size
        self.insert(rest)
        return rest

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest block of at least `size` bytes; of equal ones, the one at the lowest address."""
        return next(self.blocks_from(size), None)

    def blocks_from(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least `size` bytes, the smallest first."""
        for index in range(bisect_left(self._keys, size << _SIZE_SHIFT), len(self._keys)):
            yield self._blocks[self._keys[index]]

    def free_blocks(self) -> list[Block]:
        """Return all free blocks with memory, the smallest first."""
        return [self._blocks[key] for key in self._keys]

    def unmapped_blocks(self) -> Iterator[Block]:
        """Yield the blocks without memory, the lowest address first."""
        return (self._blocks[address] for address in self._unmapped)


class ExpandableSegments:
    """The expandable segments of one pool: reserved addresses, to which memory is mapped in handles of one size.

    Rules are those of the functions named in the docstrings, in c10/cuda/CUDACachingAllocator.cpp. A segment reserves
    `address_bytes`; `reserve_addresses` returns the first of them. `cuda_malloc` and `cuda_free` count the memory of
    the card, and `cuda_malloc` returns False if there is not enough.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        handle_bytes: int,
        address_bytes: int,
        reserve_addresses: Callable[[int], int],
        cuda_malloc: Callable[[int], bool],
        cuda_free: Callable[[int], None],
    ) -> None:
        self._pool, self._handle_bytes = pool, handle_bytes
        self._address_bytes = -(-address_bytes // handle_bytes) * handle_bytes
        self._reserve_addresses, self._cuda_malloc, self._cuda_free = reserve_addresses, cuda_malloc, cuda_free

    def best_fit(self, size: int) -> Block | None:
        """Return the best fit, where a block that can grow counts with its potential size (`get_free_block`)."""
        best: Block | None = None
        for block in self._pool.blocks_from(size):
            if best is not None and _potential_bytes(block) >= _potential_bytes(best):
                break
            best = block
        return best

    def allocate(self, size: int) -> Block | None:
        """Return a free block of at least `size` bytes, at the lowest address with room; None without memory.

        `try_allocate_expandable_block`. Memory that was mapped before memory ran out stays mapped.
        """
        block = self._find_room(size)
        if not block.mapped and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None or not self._map_block(following, min(size - block.size, following.size)):
                return None
            block = following
        self._pool.remove(block)
        return block

    def release_cached(self) -> None:
        """Unmap every handle that is completely free (`release_blocks`, `unmap_block`)."""
        unmapped = [self._unmap_block(block) for block in self._pool.free_blocks()]
        for block in unmapped:
            if block is not None and not block.is_split:
                self._pool.remove(block)

    def _find_room(self, size: int) -> Block:
        for block in self._pool.unmapped_blocks():
            prev = block.prev
            first = prev if prev is not None and not prev.allocated else block
            if _has_room(first, size):
                return first
        address = self._reserve_addresses(self._address_bytes + self._handle_bytes)
        address = -(-address // self._handle_bytes) * self._handle_bytes
        segment = Block(self._pool, address, self._address_bytes, mapped=False)
        self._pool.insert(segment)
        return segment

    def _map_block(self, block: Block, size: int) -> bool:
        mapped = -(-size // self._handle_bytes) * self._handle_bytes
        if not self._cuda_malloc(mapped):
            return False
        self._pool.remove(block)
        if mapped < block.size:
            self._pool.split(block, mapped)
        block.mapped = True
        self._pool.give_back(block)
        return True

    def _unmap_block(self, block: Block) -> Block | None:
        first = -(-block.address // self._handle_bytes) * self._handle_bytes
        last = (block.address + block.size) // self._handle_bytes * self._handle_bytes
        if first >= last:
            return None
        self._pool.remove(block)
        if first > block.address:
            front, block = block, self._pool.split(block, first - block.address)
            self._pool.remove(block)
            self._pool.insert(front)
        if last < block.address + block.size:
            self._pool.split(block, last - block.address)
        block.mapped = False
        self._pool.give_back(block)
        self._cuda_free(last - first)
        return block


def _potential_bytes(block: Block) -> int:
    """Return the size of `block` with the unmapped addresses that follow it."""
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.next
    return room >= size
