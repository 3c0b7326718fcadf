"""Seeds for reading data, independent of the random numbers that training draws, and states of generators."""

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
"""The most that NumPy's and torch's CPU generators take."""

_WORD = 2**64 - 1


def derive_seed(*numbers: int | str) -> int:
    """Derive a seed from values, the same in every process and release.

    >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=_BITS // 8).digest(), "little")


def item_seed(base: int, position: int) -> int:
    """Derive the seed of one item, cheaply: SplitMix64's finaliser (Steele et al. 2014).

    >>> item_seed(1, 0) != item_seed(1, 5)
    True
    """
    word = (base + position * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word >> (64 - _BITS)


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch; those of GPUs stay as they are."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs.


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the CPU generators of Python, NumPy and torch on exit."""
    caller = RngState()
    try:
        yield
    finally:
        caller.restore()


def capture_rng_state(devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators, torch's on the CPU and `devices`, and `generators`.

    All values load with `torch.load(weights_only=True)`, which refuses NumPy arrays.
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
    """Restore generators from `capture_rng_state`; GPUs in order, whatever their numbers."""
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    cards = [device for device in devices if device.type not in ("cpu", "meta")]
    for device, state in zip(cards, states["cards"], strict=False):
        set_device_rng_state(device, state)
    for generator, state in zip(generators, states["generators"], strict=False):
        generator.set_state(state)
