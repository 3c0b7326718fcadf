"""Seeds for what is read, so that it neither disturbs what training draws nor is disturbed by it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from autoaccum.accumulation.rng_state import RngState, device_rng_state, set_device_rng_state

_BITS = 32
"""As many as NumPy's and torch's generators on the CPU take; Python's is seeded faster with these."""

_WORD = 2**64 - 1


def derive_seed(*numbers: int | str) -> int:
    """A seed from what it shall depend on, the same in every process and release.

    >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=_BITS // 8).digest(), "little")


def item_seed(base: int, place: int) -> int:
    """Derive the seed of one item, cheaply: SplitMix64's finaliser (Steele et al. 2014).

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
def preserve_rng_state() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch on the CPU back, whatever is drawn or seeded meanwhile."""
    caller = RngState()
    try:
        yield
    finally:
        caller.restore()


def capture_rng_state(devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """The states of Python's and NumPy's generators, of torch's on the CPU and `devices`, and of `generators`.

    All of it is what `torch.load` takes with `weights_only=True`; NumPy's own array it does not.
    """
    numpy = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [value.tolist() if isinstance(value, np.ndarray) else value for value in numpy],
        "torch": torch.get_rng_state(),
        "cards": [device_rng_state(device) for device in devices if device.type not in ("cpu", "meta")],
        "generators": [generator.get_state() for generator in generators],
    }


def restore_rng_state(
    states: Mapping[str, Any], devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()
) -> None:
    """Put the generators where `states` of `capture_rng_state` has them; cards in order, whatever their numbers."""
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    cards = [device for device in devices if device.type not in ("cpu", "meta")]
    for device, state in zip(cards, states["cards"], strict=False):
        set_device_rng_state(device, state)
    for generator, state in zip(generators, states["generators"], strict=False):
        generator.set_state(state)
