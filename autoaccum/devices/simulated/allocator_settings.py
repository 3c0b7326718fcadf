"""Settings: what `PYTORCH_CUDA_ALLOC_CONF` asks of PyTorch's allocator, as far as it changes sizes.

The syntax, the bounds and which variable wins are those of `c10/core/AllocatorConfig.cpp` and
`c10/cuda/CUDAAllocatorConfig.cpp` (torch 2.11 to 2.15): `key:value,key:[a:b,c:d]`, spaces anywhere, `True` and `False`
spelled so.
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
_INTERVALS: Final = 16
_LEAST_LARGE_MIB: Final = 11
_WITHOUT_EFFECT: Final = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "graph_capture_record_stream_reuse",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_free_catch_all",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    }
)
"""Keys that concern memory of the host, locks or captured graphs."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of how PyTorch's allocator rounds, splits, grows and gives back.

    Attributes:
        expandable_segments: Whether a pool is one segment that grows by handles, not many of fixed size.
        large_segment_bytes: What is asked of CUDA for 1 to 10 MiB, and the handle of a large expandable segment.
        max_split_bytes: Blocks of this size and more are not split; None: all are.
        max_unsplit_rounding_bytes: By how much less than such a block holds it may still be given out for.
        roundup_divisions: By power of two from 1 MiB to 32 GiB: in how many steps to the next one sizes are rounded; 0
            or 1: not at all. Sizes below and above go by the first and the last.
        garbage_collection_threshold: The share of what is allowed above which old cached segments are given back
            before a new one is asked for; 0: never. PyTorch heeds it only with a `memory_fraction` below 1.
        memory_fraction: The share of the card the process is allowed.
        total_bytes: What the card has in all; None where it does not matter (see `for_card`).
    """

    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB
    max_split_bytes: int | None = None
    max_unsplit_rounding_bytes: int = 20 * MIB
    roundup_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0
    total_bytes: int | None = None

    def for_card(self, total_bytes: int) -> AllocatorSettings:
        """The same on a card of `total_bytes`: what a share of the memory refers to."""
        return replace(self, total_bytes=total_bytes)

    @property
    def allowed_bytes(self) -> int | None:
        """Return what the process is allowed to reserve; None without a limit (`setMemoryFraction`).

        Raises:
            ValueError: There is a share, and nobody said of what.
        """
        if self.memory_fraction >= 1:
            return None
        if self.total_bytes is None:
            raise ValueError("per_process_memory_fraction needs the card's total: use settings.for_card(total_bytes)")
        return int(self.memory_fraction * self.total_bytes)


def read_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Read what the environment asks of the allocator, as torch does.

    `PYTORCH_CUDA_ALLOC_CONF` wins over `PYTORCH_ALLOC_CONF` where both are set, even when it is empty: torch 2.11 to
    2.15 read the first that is there, whatever their headers say.

    Raises:
        UsageError: It does not have the form, torch would refuse it, or it asks for what is not simulated.

    >>> read_settings({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    True
    >>> read_settings({}) == AllocatorSettings()
    True
    """
    if _NO_CACHING in environment:  # Whatever its value: `forceUncachedAllocator` of c10/cuda/CUDACachingAllocator.cpp.
        raise UsageError(
            f"{_NO_CACHING} is set, and only PyTorch's allocator with its cache is simulated", hint="unset it to plan"
        )
    for variable in _VARIABLES:
        text = environment.get(variable)
        if text is not None:
            return _read(variable, text)
    return AllocatorSettings()


def _read(variable: str, text: str) -> AllocatorSettings:
    text = "".join(text.split())
    pairs = [entry.partition(":") for entry in re.split(r",(?![^\[]*\])", text) if entry]
    changes: dict[str, Any] = {}
    # torch reads the large segment first, because the other sizes may not lie below it.
    for key, colon, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        try:
            if not (key and colon and value) or value.count("[") != value.count("]"):
                raise ValueError("which is no key:value")
            if key in _WITHOUT_EFFECT:
                continue
            if key not in _KEYS:
                raise ValueError("which is not simulated")
            name, parse = _KEYS[key]
            found = parse(value, changes)
        except ValueError as error:
            hint = "leave that key out, or write what torch takes"
            raise UsageError(f"{variable} has {key}{colon}{value}, {error}", hint=hint) from None
        if name is not None:
            changes[name] = found
        if key == "large_segment_size_mb":
            changes["max_unsplit_rounding_bytes"] = found
    return AllocatorSettings(**changes)


def _large_segment(value: str, changes: Mapping[str, Any]) -> int:
    return _mebibytes(value, _LEAST_LARGE_MIB)


def _size(value: str, changes: Mapping[str, Any]) -> int:
    return _mebibytes(value, changes.get("large_segment_bytes", AllocatorSettings.large_segment_bytes) // MIB)


def _mebibytes(value: str, least: int) -> int:
    digits = re.match(r"\d+", value)
    if digits is None or int(digits[0]) < least:
        raise ValueError(f"and torch wants a number of at least {least}")
    return int(digits[0]) * MIB


def _share(value: str, changes: Mapping[str, Any]) -> float:
    if not re.fullmatch(r"0*\.\d+|[01]\.?0*", value):
        raise ValueError("which is no share between 0 and 1")
    return float(value)


def _threshold(value: str, changes: Mapping[str, Any]) -> float:
    if _share(value, changes) in (0.0, 1.0):
        raise ValueError("and torch wants it between 0 and 1")
    return float(value)


def _switch(value: str, changes: Mapping[str, Any]) -> bool:
    if value not in ("True", "False"):
        raise ValueError("and torch knows only True and False")
    return value == "True"


def _native(value: str, changes: Mapping[str, Any]) -> None:
    if value != "native":
        raise ValueError("and only PyTorch's own allocator is simulated")


def _never_thrown(value: str, changes: Mapping[str, Any]) -> None:
    if _switch(value, changes):
        raise ValueError("which is not simulated")


def _divisions(value: str, changes: Mapping[str, Any]) -> tuple[int, ...]:
    """One number for all sizes, or `[MiB:number,...,>:number]` by the power of two a size lies above."""
    if not value.startswith("["):
        return (_power(value),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, None
    for entry in value.strip("[]").split(","):
        boundary, _, number = entry.partition(":")
        steps = 0 if number == "0" else _power(number)
        if boundary == ">":
            first = 0 if last is None else last
            divisions[first + 1 :] = [steps] * (_INTERVALS - first - 1)
            continue
        index = min(_power(boundary).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            divisions[:index] = [steps] * index
        divisions[index] = steps
        last = index
    return tuple(divisions)


def _power(text: str) -> int:
    number = int(text) if re.fullmatch(r"\d+", text) else 0
    if number < 1 or number & (number - 1):
        raise ValueError(f"where {text or 'nothing'} is no power of two")
    return number


_KEYS: Final[Mapping[str, tuple[str | None, Callable[[str, Mapping[str, Any]], Any]]]] = {
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
    "max_split_size_mb": ("max_split_bytes", _size),
    "max_non_split_rounding_mb": ("max_unsplit_rounding_bytes", _size),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "expandable_segments": ("expandable_segments", _switch),
    "backend": (None, _native),
    "throw_on_cudamalloc_oom": (None, _never_thrown),
}
"""By key: the setting it changes, and what reads its value beside the changes so far."""
