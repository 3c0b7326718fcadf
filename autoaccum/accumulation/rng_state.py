"""The random states a step may draw from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Generator: TypeAlias = "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class RngState:
    """The generators of Python, NumPy, torch on the CPU and on `devices`, and `generators`.

    Attributes:
        states: Of the global ones, by name.
    """

    def __init__(self, devices: Iterable[torch.device] = (), generators: Iterable[Generator] = ()) -> None:
        self.states: dict[str, Any] = {
            "Python": random.getstate(),
            "NumPy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.states |= {str(device): device_rng_state(device) for device in self._devices}
        self._rewinds = [generator_restorer(generator) for generator in generators]

    def restore(self) -> None:
        """Rewind every generator."""
        random.setstate(self.states["Python"])
        np.random.set_state(self.states["NumPy"])
        torch.set_rng_state(self.states["torch"])
        for device in self._devices:
            set_device_rng_state(device, self.states[str(device)])
        for rewind in self._rewinds:
            rewind()


def module_generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """The generators that modules keep as attributes: torch's, NumPy's and Python's."""
    found = (value for module in modules for value in vars(module).values() if isinstance(value, GENERATORS))
    return list({id(generator): generator for generator in found}.values())


def has_readable_state(generator: Generator) -> bool:
    """Not so for `SystemRandom`, which has none, and a class of the user's own with a state of its own."""
    return not isinstance(generator, random.Random) or type(generator).getstate is random.Random.getstate


def initialized_cuda_devices() -> list[torch.device]:
    """Every card whose generators exist: all of them once CUDA has started, none before."""
    if not torch.get_device_module("cuda").is_initialized():
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def generator_state(generator: Generator) -> Any:
    """The state of one generator, as something that can be hashed; None for one that has none (`SystemRandom`)."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


def generator_restorer(generator: Generator) -> Callable[[], None]:
    """What puts `generator` back to where it is now."""
    state = generator_state(generator)
    return lambda: set_generator_state(generator, state)


def set_generator_state(generator: Generator, state: Any) -> None:
    """Put `generator` to a state that `generator_state` gave, of it or of an equal one."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif state is not None:
        generator.setstate(state)


def device_rng_state(device: torch.device) -> Tensor:
    """The state of the default generator of `device`."""
    module = torch.get_device_module(device)
    state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    assert isinstance(state, Tensor)
    return state


def set_device_rng_state(device: torch.device, state: Tensor) -> None:
    """Put the default generator of `device` to `state` of `device_rng_state`."""
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)
