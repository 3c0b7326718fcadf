"""The random states a step may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RandomState:
    """The generators of Python, NumPy (where loaded), torch on the CPU and on `devices`, and `generators`."""

    def __init__(self, devices: Iterable[torch.device] = (), generators: Iterable[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        numpy_random = sys.modules.get("numpy.random")
        self._numpy: Any = None if numpy_random is None else numpy_random.get_state()
        self._cpu = torch.get_rng_state()
        self._devices = [(device, _device_state(device)) for device in devices if device.type not in ("cpu", "meta")]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Rewind every generator."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            module = torch.get_device_module(device)
            if device.type == "mps":
                module.set_rng_state(state)
            else:
                module.set_rng_state(state, device)
        for generator, state in self._generators:
            generator.set_state(state)


def own_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """The `torch.Generator`s that modules keep as attributes."""
    found = (value for module in modules for value in vars(module).values() if isinstance(value, torch.Generator))
    return list({id(generator): generator for generator in found}.values())


def _device_state(device: torch.device) -> Tensor:
    module = torch.get_device_module(device)
    state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    assert isinstance(state, Tensor)
    return state
