"""One CUDA card, as PyTorch in a process with a context on it sees it: a record, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A card and its memory, in bytes, at one moment.

    Attributes:
        index: As in `cuda:N`: among the cards that are visible to this process.
        name: The model's name, such as `NVIDIA GeForce RTX 3090`.
        total_bytes: All there is, as PyTorch takes fractions of it.
        free_bytes: What the driver would still give to anyone (cudaMemGetInfo).
        reserved_bytes: What PyTorch's allocator in this process holds already.
        capability: Compute capability, such as (8, 6).
        multiprocessors: How many there are.
        uuid: Without prefix; None where PyTorch does not tell.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None

    @property
    def available_bytes(self) -> int:
        """The most PyTorch's allocator in this process could hold: what it holds, and what is free."""
        return min(self.total_bytes, self.reserved_bytes + self.free_bytes)

    @property
    def held_outside_bytes(self) -> int:
        """What is neither free nor this allocator's: other processes, and this one's context."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)
