"""What `PYTORCH_CUDA_ALLOC_CONF` asks of PyTorch's allocator, as far as it changes sizes.

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
_SWITCHES: Final = frozenset({"True", "False"})
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
    """What changes how PyTorch's allocator rounds, splits, grows and gives back.

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
        """What the process is allowed to reserve; None without a limit (`setMemoryFraction`).

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
            return _Reader(variable).read(text)
    return AllocatorSettings()


class _Reader:
    """Reads one variable; its name is part of every complaint."""

    def __init__(self, variable: str) -> None:
        self._variable = variable
        self._changes: dict[str, Any] = {}
        self._read: Mapping[str, Callable[[str, str], None]] = {
            "large_segment_size_mb": self._large_segment,
            "max_split_size_mb": self._max_split,
            "max_non_split_rounding_mb": self._unsplit_rounding,
            "roundup_power2_divisions": self._divisions,
            "garbage_collection_threshold": self._threshold,
            "per_process_memory_fraction": self._fraction,
            "expandable_segments": self._expandable,
            "backend": self._backend,
            "throw_on_cudamalloc_oom": self._throw,
        }

    def read(self, text: str) -> AllocatorSettings:
        pairs = self._pairs("".join(text.split()))
        # torch reads the large segment first, because the other sizes may not lie below it.
        for key, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
            if key in self._read:
                self._read[key](key, value)
            elif key not in _WITHOUT_EFFECT:
                raise self._refusal(f"{key}:{value}", "which is not simulated", "leave that key out")
        return AllocatorSettings(**self._changes)

    def _pairs(self, text: str) -> list[tuple[str, str]]:
        entries = [entry for entry in re.split(r",(?![^\[]*\])", text) if entry]
        pairs = [entry.partition(":") for entry in entries]
        for (key, colon, value), entry in zip(pairs, entries, strict=True):
            if not (key and colon and value) or value.count("[") != value.count("]"):
                raise self._refusal(entry, "which is no key:value", "write key:value,key:value")
        return [(key, value) for key, _, value in pairs]

    def _refusal(self, seen: str, bound: str, way_out: str) -> UsageError:
        return UsageError(f"{self._variable} has {seen}, {bound}", hint=way_out)

    def _mebibytes(self, key: str, value: str, least: int) -> int:
        digits = re.match(r"\d+", value)
        if digits is None or int(digits[0]) < least:
            raise self._refusal(f"{key}:{value}", f"and torch wants a number of at least {least}", f"try {key}:{least}")
        return int(digits[0]) * MIB

    def _share(self, key: str, value: str) -> float:
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise self._refusal(f"{key}:{value}", "which is no share between 0 and 1", f"try {key}:0.8")
        return share

    def _switch(self, key: str, value: str) -> bool:
        if value not in _SWITCHES:
            raise self._refusal(f"{key}:{value}", "and torch knows only True and False", f"write {key}:True")
        return value == "True"

    def _large_segment(self, key: str, value: str) -> None:
        self._changes["large_segment_bytes"] = self._mebibytes(key, value, _LEAST_LARGE_MIB)
        self._changes["max_unsplit_rounding_bytes"] = self._changes["large_segment_bytes"]

    def _least(self) -> int:
        return int(self._changes.get("large_segment_bytes", AllocatorSettings.large_segment_bytes)) // MIB

    def _max_split(self, key: str, value: str) -> None:
        self._changes["max_split_bytes"] = self._mebibytes(key, value, self._least())

    def _unsplit_rounding(self, key: str, value: str) -> None:
        self._changes["max_unsplit_rounding_bytes"] = self._mebibytes(key, value, self._least())

    def _threshold(self, key: str, value: str) -> None:
        share = self._share(key, value)
        if share in (0.0, 1.0):
            raise self._refusal(f"{key}:{value}", "and torch wants it between 0 and 1", f"try {key}:0.8")
        self._changes["garbage_collection_threshold"] = share

    def _fraction(self, key: str, value: str) -> None:
        self._changes["memory_fraction"] = self._share(key, value)

    def _expandable(self, key: str, value: str) -> None:
        self._changes["expandable_segments"] = self._switch(key, value)

    def _backend(self, key: str, value: str) -> None:
        if value != "native":
            raise self._refusal(
                f"{key}:{value}", "and only PyTorch's own allocator is simulated", "leave it out, or write native"
            )

    def _throw(self, key: str, value: str) -> None:
        if self._switch(key, value):
            raise self._refusal(f"{key}:{value}", "which is not simulated", "leave that key out")

    def _divisions(self, key: str, value: str) -> None:
        """One number for all sizes, or `[MiB:number,...,>:number]` by the power of two a size lies above."""
        if not value.startswith("["):
            self._changes["roundup_divisions"] = (self._power(key, value, value),) * _INTERVALS
            return
        divisions, last = [0] * _INTERVALS, None
        for entry in value.strip("[]").split(","):
            boundary, _, number = entry.partition(":")
            steps = 0 if number == "0" else self._power(key, number, value)
            if boundary == ">":
                first = 0 if last is None else last
                divisions[first + 1 :] = [steps] * (_INTERVALS - first - 1)
                continue
            index = min(self._power(key, boundary, value).bit_length() - 1, _INTERVALS - 1)
            if last is None:
                divisions[:index] = [steps] * index
            divisions[index] = steps
            last = index
        self._changes["roundup_divisions"] = tuple(divisions)

    def _power(self, key: str, text: str, value: str) -> int:
        number = int(text) if re.fullmatch(r"\d+", text) else 0
        if number < 1 or number & (number - 1):
            raise self._refusal(
                f"{key}:{value}", f"where {text or 'nothing'} is no power of two", f"try {key}:4 or {key}:[256:4,>:8]"
            )
        return number
