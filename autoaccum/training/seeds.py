"""Seeds for what is read, and random streams that neither disturb training's nor are disturbed by it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from autoaccum.accumulation.randomness import RandomState
from autoaccum.training.checkpoints import random_states

_BITS = 32
"""As many as NumPy's and torch's generators on the CPU take; Python's is seeded faster with these."""

_WORD = 2**64 - 1


def mix(*numbers: int | str) -> int:
    """A seed from what it shall depend on, the same in every process and release.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=_BITS // 8).digest(), "little")


def item_seed(base: int, place: int, index: int) -> int:
    """As `mix`, for what is needed for every item: SplitMix64's finaliser (Steele et al. 2014), a few operations.

    >>> item_seed(1, 0, 5) != item_seed(1, 5, 0)
    True
    """
    word = (base + place * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) & _WORD
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


class RandomStream:
    """Random states of their own for what is run in turns with something else.

    Attributes:
        seed: What the stream begins from.
        place: Where it is; None at its beginning.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.place: RandomState | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Swap the stream in, and the caller's states back in afterwards."""
        with kept_randomness():
            self._enter(self.place)
            try:
                yield
            finally:
                self.place = RandomState()

    def rewind(self) -> None:
        """Go to its beginning, while it is running."""
        seed_generators(self.seed)

    def describe(self, place: RandomState | None) -> dict[str, Any] | None:
        """A place of the stream as plain values; None for its beginning."""
        if place is None:
            return None
        with kept_randomness():
            place.restore()
            return random_states.capture((), {})

    def restore(self, described: Mapping[str, Any] | None) -> None:
        """Go to a place that `describe` gave."""
        self.place = None
        if described is not None:
            with kept_randomness():
                random_states.restore(described, (), {})
                self.place = RandomState()

    def _enter(self, place: RandomState | None) -> None:
        if place is None:
            seed_generators(self.seed)
        else:
            place.restore()
