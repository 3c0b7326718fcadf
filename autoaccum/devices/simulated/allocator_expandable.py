"""Segments that grow and shrink by handles: `expandable_segments:True`."""

from __future__ import annotations

from collections.abc import Callable

from autoaccum.devices.simulated.allocator_blocks import Block, Pool

Take = Callable[[int], bool]
"""Asks for bytes of the card, and tells whether there were so many."""


class Handles:
    """Memory of a pool in handles of one size, mapped to addresses that were set aside.

    A rule's source is the function of a like name in `c10/cuda/CUDACachingAllocator.cpp`.

    Args:
        pool: Whose blocks these are.
        handle_bytes: What one handle holds.
        address_bytes: How many addresses a segment sets aside.
        place: Where the next segment begins, by its size.
        take: Asks for memory of the card.
        give: Gives memory back to it.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        handle_bytes: int,
        address_bytes: int,
        place: Callable[[int], int],
        take: Take,
        give: Callable[[int], None],
    ) -> None:
        self._pool, self._handle_bytes = pool, handle_bytes
        self._address_bytes = -(-address_bytes // handle_bytes) * handle_bytes
        self._place, self._take, self._give = place, take, give

    def best(self, size: int) -> Block | None:
        """The best fit, where a block that can grow counts as large as it may become (`get_free_block`)."""
        best: Block | None = None
        for block in self._pool.from_size(size):
            if best is not None and _may_become(block) >= _may_become(best):
                break
            best = block
        return best

    def grow(self, size: int) -> Block | None:
        """A free block of at least `size` bytes at the lowest address that has room (`try_allocate_expandable_block`).

        What was mapped before memory ran out stays so.
        """
        block = self._find(size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.behind
            if behind is None or not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind
        self._pool.remove(block)
        return block

    def release(self) -> None:
        """Unmap every handle that is wholly free (`release_blocks`, `unmap_block`)."""
        unmapped = [self._unmap(block) for block in self._pool.free() if block.segment_bytes is not None]
        for block in unmapped:
            if block is not None and not block.split:
                self._pool.remove(block)

    def _find(self, size: int) -> Block:
        for block in self._pool.unmapped():
            before = block.before
            first = before if before is not None and not before.allocated else block
            if _has_room(first, size):
                return first
        address = self._place(self._address_bytes + self._handle_bytes)
        address = -(-address // self._handle_bytes) * self._handle_bytes
        segment = Block(self._pool, address, self._address_bytes, mapped=False, segment_bytes=self._address_bytes)
        self._pool.insert(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        mapped = -(-size // self._handle_bytes) * self._handle_bytes
        if not self._take(mapped):
            return False
        self._pool.remove(block)
        if mapped < block.size:
            self._pool.insert(block.cut(mapped))
        block.mapped = True
        block.merge()
        self._pool.insert(block)
        return True

    def _unmap(self, block: Block) -> Block | None:
        first = -(-block.address // self._handle_bytes) * self._handle_bytes
        last = (block.address + block.size) // self._handle_bytes * self._handle_bytes
        if first >= last:
            return None
        self._pool.remove(block)
        if first > block.address:
            front, block = block, block.cut(first - block.address)
            self._pool.insert(front)
        if last < block.address + block.size:
            self._pool.insert(block.cut(last - block.address))
        block.mapped = False
        block.merge()
        self._pool.insert(block)
        self._give(last - first)
        return block


def _may_become(block: Block) -> int:
    """Its size with the addresses behind it that have no memory yet."""
    behind = block.behind
    return block.size if behind is None or behind.mapped else block.size + behind.size


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.behind
    return room >= size
