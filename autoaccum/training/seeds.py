"""Seeds for what is read, so that it neither disturbs what training draws nor is disturbed by it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

from autoaccum.accumulation.randomness import RandomState

_BITS = 32
"""As many as NumPy's and torch's generators on the CPU take; Python's is seeded faster with these."""

_WORD = 2**64 - 1


def mix(*numbers: int | str) -> int:
    """A seed from what it shall depend on, the same in every process and release.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=_BITS // 8).digest(), "little")


def item_seed(base: int, place: int) -> int:
    """As `mix`, for what is needed for every item: SplitMix64's finaliser (Steele et al. 2014), a few operations.

    >>> item_seed(1, 0) != item_seed(1, 5)
    True
    """
    word = (base + place * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word >> (64 - _BITS)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators on the CPU; those of cards stay as they are."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch on the CPU back, whatever is drawn or seeded meanwhile."""
    caller = RandomState()
    try:
        yield
    finally:
        caller.restore()
