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
        states: The states, as `restore_rng_state` takes them.
    """

    def __init__(self, devices: Iterable[torch.device] = (), generators: Iterable[Generator] = ()) -> None:
        self._devices, self._generators = list(devices), list(generators)
        self.states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cards": [
                torch.get_device_module(device).get_rng_state(*_card_arguments(device))
                for device in filter(_is_card, self._devices)
            ],
            "generators": [generator_state(generator) for generator in self._generators],
        }

    def digest(self) -> bytes:
        """Return bytes that are equal where all states are equal."""
        python, numpy, cpu, cards, generators = self.states.values()
        others = [state.tolist() if isinstance(state, Tensor) else state for state in (cpu, *cards, *generators)]
        return pickle.dumps([python, numpy, *others])

    def saved(self) -> dict[str, Any]:
        """Return the states for a file that loads with `torch.load(weights_only=True)`, which refuses NumPy arrays."""
        numpy = [value.tolist() if isinstance(value, np.ndarray) else value for value in self.states["numpy"]]
        return {**self.states, "numpy": numpy}

    def restore(self) -> None:
        """Restore the state of every generator."""
        restore_rng_state(self.states, self._devices, self._generators)


def restore_rng_state(
    states: Mapping[str, Any], devices: Iterable[torch.device] = (), generators: Iterable[Generator] = ()
) -> None:
    """Restore generators from the states of a `RngState`; GPUs in order, whatever their numbers."""
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    for device, state in zip(filter(_is_card, devices), states["cards"], strict=False):
        torch.get_device_module(device).set_rng_state(state, *_card_arguments(device))
    for generator, state in zip(generators, states["generators"], strict=False):
        set_generator_state(generator, state)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the CPU generators of Python, NumPy and torch on exit."""
    caller = RngState()
    try:
        yield
    finally:
        caller.restore()


def module_generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """Return the generators that are attributes of `modules`: PyTorch's, NumPy's and Python's."""
    attributes = (value for module in modules for value in vars(module).values() if isinstance(value, GENERATORS))
    return list({id(generator): generator for generator in attributes}.values())


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


def _is_card(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def _card_arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # There is only one.


_SEED_BYTES = 4
"""The most that NumPy's and torch's CPU generators take."""


def derive_seed(*numbers: int | str) -> int:
    """Derive a seed from values, the same in every process and release.

    >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
    (True, False)
    """
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=_SEED_BYTES).digest(), "little")


def seed_generators(seed: int, others: Iterable[Generator] = ()) -> None:
    """Seed the CPU generators of Python, NumPy and torch, and `others`; those of GPUs stay as they are."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs.
    for number, generator in enumerate(others, 1):
        derived = derive_seed(seed, number)  # With one seed, all would draw the same numbers.
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derived)
        elif isinstance(generator, np.random.Generator):
            bits: Any = type(generator.bit_generator)
            generator.bit_generator.state = bits(derived).state
        else:
            generator.seed(derived)
