"""Settings of PyTorch's allocator from `PYTORCH_CUDA_ALLOC_CONF`, as far as they change sizes.

Syntax and bounds are those of c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp (torch 2.11 to 2.15):
`key:value,key:value`, with spaces anywhere, and `True` and `False` in this spelling.
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
_WITHOUT_EFFECT: Final = ("release_lock_on_", "graph_capture_", "pinned_", "garbage_collection_threshold")
"""Prefixes of keys for host memory, locks, captured graphs, and what needs a share of the card."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings that decide how PyTorch's allocator rounds, splits and grows.

    Attributes:
        expandable_segments: True if a pool grows by mapping memory, instead of by segments of fixed size.
        max_split_bytes: Blocks of this size and more are not split; None splits all.
        roundup_divisions: The steps between two powers of two to which sizes are rounded; 0 or 1 for none.
        memory_fraction: The share of the card that the process may reserve.
        total_bytes: The memory of the card; None if no share of it is needed (see `for_card`).
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: int = 0
    memory_fraction: float = 1.0
    total_bytes: int | None = None

    def for_card(self, total_bytes: int) -> AllocatorSettings:
        """Return the settings on a card of `total_bytes`, to which a share of the memory refers."""
        return replace(self, total_bytes=total_bytes)

    @property
    def allowed_bytes(self) -> int | None:
        """Return the bytes that the process may reserve; None without a limit (`setMemoryFraction`)."""
        if self.memory_fraction >= 1:
            return None
        if self.total_bytes is None:
            raise ValueError("per_process_memory_fraction needs the card's total: use settings.for_card(total_bytes)")
        return int(self.memory_fraction * self.total_bytes)


def read_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Read the settings of the environment as torch does.

    `PYTORCH_CUDA_ALLOC_CONF` wins over `PYTORCH_ALLOC_CONF` if both are set, even if it is empty.

    Raises:
        UsageError: A setting has another form, torch would refuse it, or it is not simulated.

    >>> read_settings({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    True
    """
    if _NO_CACHING in environment:  # Whatever its value: `forceUncachedAllocator` of c10/cuda/CUDACachingAllocator.cpp.
        raise UsageError(
            f"{_NO_CACHING} is set, but only PyTorch's allocator with its cache is simulated", hint="unset it to plan"
        )
    variable = next((name for name in _VARIABLES if name in environment), None)
    return AllocatorSettings() if variable is None else _read(variable, environment[variable])


def _read(variable: str, text: str) -> AllocatorSettings:
    changes: dict[str, Any] = {}
    for entry in filter(None, re.split(r",(?![^\[]*\])", "".join(text.split()))):
        key, _, value = entry.partition(":")
        if key.startswith(_WITHOUT_EFFECT) or entry in _AS_SIMULATED:
            continue
        try:
            if key not in _KEYS:
                raise ValueError("which is not simulated")
            name, parse = _KEYS[key]
            changes[name] = parse(value)
        except ValueError as error:
            hint = "leave that key out, or give a value that torch accepts"
            raise UsageError(f"{variable} has {entry}, {error}", hint=hint) from None
    return AllocatorSettings(**changes)


def _split(value: str) -> int:
    digits = re.match(r"\d+", value)
    if digits is None or int(digits[0]) < _LEAST_SPLIT_MIB:
        raise ValueError(f"but torch requires a number of at least {_LEAST_SPLIT_MIB}")
    return int(digits[0]) * MIB


def _share(value: str) -> float:
    if not re.fullmatch(r"0*\.\d+|[01]\.?0*", value):
        raise ValueError("which is no fraction between 0 and 1")
    return float(value)


def _switch(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("but torch accepts only True and False")
    return value == "True"


def _divisions(value: str) -> int:
    number = int(value) if re.fullmatch(r"\d+", value) else 0
    if number < 1 or number & (number - 1):
        raise ValueError("but only one power of two for all sizes is simulated")
    return number


_AS_SIMULATED: Final = ("backend:native", "throw_on_cudamalloc_oom:False")
_KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "max_split_size_mb": ("max_split_bytes", _split),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "expandable_segments": ("expandable_segments", _switch),
}
"""By key, the setting and the function that reads its value."""
