"""The cards that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card as PyTorch on Linux sees it.

    Attributes:
        name: As people type it: `rtx3090`, `a100-80gb`.
        title: As the driver calls it: `NVIDIA GeForce RTX 3090`.
        total_bytes: What `torch.cuda.get_device_properties` tells as total memory.
        capability: Compute capability, such as (8, 6).
        multiprocessors: How many there are.
        source: Where these figures come from.
    """

    name: str
    title: str
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    source: str
