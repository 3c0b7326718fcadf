"""Random generators of Python, NumPy and PyTorch: derive seeds, and capture and restore states."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Generator: TypeAlias = "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class RngState:
    """A copy of the states of the global generators (Python, NumPy, PyTorch on CPU and `devices`) and of `generators`.

    Attributes:
        states: The states of the global generators, by name.
    """

    def __init__(self, devices: Iterable[torch.device] = (), generators: Iterable[Generator] = ()) -> None:
        self.states: dict[str, Any] = {
            "Python": random.getstate(),
            "NumPy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.states |= {str(device): device_rng_state(device) for device in self._devices}
        self._generators = [(generator, generator_state(generator)) for generator in generators]

    def digest(self) -> bytes:
        """Return bytes that are equal where all states are equal."""
        states = [*self.states.values(), *(state for _, state in self._generators)]
        return pickle.dumps([state.tolist() if isinstance(state, Tensor) else state for state in states])

    def restore(self) -> None:
        """Restore the state of every generator."""
        random.setstate(self.states["Python"])
        np.random.set_state(self.states["NumPy"])
        torch.set_rng_state(self.states["torch"])
        for device in self._devices:
            set_device_rng_state(device, self.states[str(device)])
        for generator, state in self._generators:
            set_generator_state(generator, state)


def module_generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """Return the generators that are attributes of `modules`: PyTorch's, NumPy's and Python's."""
    found = (value for module in modules for value in vars(module).values() if isinstance(value, GENERATORS))
    return list({id(generator): generator for generator in found}.values())


def has_readable_state(generator: Generator) -> bool:
    """Return whether the state of `generator` can be read: not of `SystemRandom`, nor of a class that overrides it."""
    return not isinstance(generator, random.Random) or type(generator).getstate is random.Random.getstate


def initialized_cuda_devices() -> list[torch.device]:
    """Return all CUDA devices once CUDA is initialized, and none before, when their generators do not exist yet."""
    if not torch.get_device_module("cuda").is_initialized():
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def generator_state(generator: Generator) -> Any:
    """Return the state of `generator` in a form that can be hashed; None for `SystemRandom`, which has no state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set `generator` to a state that `generator_state` returned for it or for another generator of its kind."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif state is not None:
        generator.setstate(state)


def device_rng_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of `device`."""
    module = torch.get_device_module(device)
    state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    assert isinstance(state, Tensor)
    return state


def set_device_rng_state(device: torch.device, state: Tensor) -> None:
    """Set the default generator of `device` to a state that `device_rng_state` returned."""
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


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


def seed_generators(seed: int, others: Iterable[Generator] = ()) -> None:
    """Seed the CPU generators of Python, NumPy and torch, and `others`; those of GPUs stay as they are."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs.
    for number, generator in enumerate(others, 1):
        own = item_seed(seed, number)  # With one seed, all would draw the same numbers.
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            bits: Any = type(generator.bit_generator)
            generator.bit_generator.state = bits(own).state
        else:
            generator.seed(own)


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
