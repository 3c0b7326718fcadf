"""One CUDA card, as PyTorch in a process with a context on it sees it: a record, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoaccum.errors import UsageError


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
        allowed_bytes: What the allocator is limited to already (`set_per_process_memory_fraction`, or
            `PYTORCH_ALLOC_CONF=per_process_memory_fraction:...`); None without a limit.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None
    allowed_bytes: int | None = None

    @property
    def available_bytes(self) -> int:
        """The most PyTorch's allocator in this process could hold: what it holds, and what is free."""
        allowed = self.total_bytes if self.allowed_bytes is None else self.allowed_bytes
        return min(allowed, self.reserved_bytes + self.free_bytes)

    @property
    def held_outside_bytes(self) -> int:
        """What is neither free nor this allocator's: other processes, and this one's context."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


def check_index(index: int, names: Sequence[str], visible: str | None) -> None:
    """Refuse an index beyond the visible cards.

    Args:
        index: As in `cuda:N`.
        names: Of the visible cards, in CUDA's order.
        visible: CUDA_VISIBLE_DEVICES; None when it is not set.

    Raises:
        UsageError: There is no such card.

    >>> check_index(2, ["NVIDIA A100", "NVIDIA T4"], None)
    Traceback (most recent call last):
    autoaccum.errors.UsageError: there is no cuda:2: 2 cards are visible, cuda:0 (NVIDIA A100), cuda:1 (NVIDIA T4): \
take one of these
    """
    if index < len(names):
        return
    seen = {0: "no card is visible", 1: "1 card is visible"}.get(len(names), f"{len(names)} cards are visible")
    hidden = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    listed = "".join(f", cuda:{number} ({name})" for number, name in enumerate(names))
    ways_out = {0: "nvidia-smi should list it, and the driver be new enough for this build of PyTorch", 1: "take it"}
    raise UsageError(
        f"there is no cuda:{index}: {seen}{hidden}{listed}", hint=ways_out.get(len(names), "take one of these")
    )
