"""Settings: what `PYTORCH_CUDA_ALLOC_CONF` asks of PyTorch's allocator, as far as it changes sizes.

The syntax and the bounds are those of `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp` (torch 2.11
to 2.15): `key:value,key:value`, spaces anywhere, `True` and `False` spelled so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from autoaccum.errors import UsageError
from autoaccum.units import MIB

_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_LEAST_SPLIT_MIB: Final = 20
_WITHOUT_EFFECT: Final = ("release_lock_on_", "graph_capture_", "pinned_")
"""How keys begin that concern memory of the host, locks or captured graphs."""
_COLLECTION: Final = "garbage_collection_threshold"
"""Heeded only with a share of the card (`set_fraction` in c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of how PyTorch's allocator rounds, splits and grows.

    Attributes:
        expandable_segments: Whether a pool is one segment that grows by handles, not many of fixed size.
        max_split_bytes: Blocks of this size and more are not split; None: all are.
        roundup_divisions: In how many steps to the next power of two sizes are rounded; 0 or 1: not at all.
        memory_fraction: The share of the card the process is allowed.
        total_bytes: What the card has in all; None where it does not matter (see `for_card`).
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: int = 0
    memory_fraction: float = 1.0
    total_bytes: int | None = None

    def for_card(self, total_bytes: int) -> AllocatorSettings:
        """The same on a card of `total_bytes`: what a share of the memory refers to."""
        return replace(self, total_bytes=total_bytes)

    @property
    def allowed_bytes(self) -> int | None:
        """Return what the process is allowed to reserve; None without a limit (`setMemoryFraction`)."""
        if self.memory_fraction >= 1:
            return None
        if self.total_bytes is None:
            raise ValueError("per_process_memory_fraction needs the card's total: use settings.for_card(total_bytes)")
        return int(self.memory_fraction * self.total_bytes)


def read_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Read what the environment asks of the allocator, as torch does.

    `PYTORCH_CUDA_ALLOC_CONF` wins over `PYTORCH_ALLOC_CONF` where both are set, even when it is empty.

    Raises:
        UsageError: It does not have the form, torch would refuse it, or it asks for what is not simulated.

    >>> read_settings({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    True
    """
    if _NO_CACHING in environment:  # Whatever its value: `forceUncachedAllocator` of c10/cuda/CUDACachingAllocator.cpp.
        raise UsageError(
            f"{_NO_CACHING} is set, and only PyTorch's allocator with its cache is simulated", hint="unset it to plan"
        )
    variable = next((name for name in _VARIABLES if name in environment), None)
    return AllocatorSettings() if variable is None else _read(variable, environment[variable])


def _read(variable: str, text: str) -> AllocatorSettings:
    changes: dict[str, Any] = {}
    collects = False
    for entry in filter(None, re.split(r",(?![^\[]*\])", "".join(text.split()))):
        key, _, value = entry.partition(":")
        if key.startswith(_WITHOUT_EFFECT) or entry in _AS_SIMULATED:
            continue
        if key == _COLLECTION:
            collects = True
            continue
        try:
            if key not in _KEYS:
                raise ValueError("which is not simulated")
            name, parse = _KEYS[key]
            changes[name] = parse(value)
        except ValueError as error:
            hint = "leave that key out, or write what torch takes"
            raise UsageError(f"{variable} has {entry}, {error}", hint=hint) from None
    settings = AllocatorSettings(**changes)
    if collects and settings.memory_fraction < 1:
        raise UsageError(
            f"{variable} has {_COLLECTION} beside a share of the card, which is not simulated", hint="leave one out"
        )
    return settings


def _split(value: str) -> int:
    digits = re.match(r"\d+", value)
    if digits is None or int(digits[0]) < _LEAST_SPLIT_MIB:
        raise ValueError(f"and torch wants a number of at least {_LEAST_SPLIT_MIB}")
    return int(digits[0]) * MIB


def _share(value: str) -> float:
    if not re.fullmatch(r"0*\.\d+|[01]\.?0*", value):
        raise ValueError("which is no share between 0 and 1")
    return float(value)


def _switch(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("and torch knows only True and False")
    return value == "True"


def _divisions(value: str) -> int:
    number = int(value) if re.fullmatch(r"\d+", value) else 0
    if number < 1 or number & (number - 1):
        raise ValueError("and only one power of two for all sizes is simulated")
    return number


_AS_SIMULATED: Final = ("backend:native", "throw_on_cudamalloc_oom:False")
_KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "max_split_size_mb": ("max_split_bytes", _split),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "expandable_segments": ("expandable_segments", _switch),
}
"""By key: the setting it changes, and what reads its value."""
