"""Estimates of a kernel's own memory, and the workspaces of cuBLAS.

ATen/cuda/CublasHandlePool.cpp (`parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize`). Up to 2.14 a workspace is
kept for each (handle, stream): one for the thread that runs forward passes, one for autograd's. From 2.15 on it is
allocated for each product and freed, unless `TORCH_CUBLAS_WORKSPACE_CACHE=1`. cuBLASLt, which adds a bias, has one of
its own in 2.11, kept likewise beside that of cuBLAS; later it shares that one where it is kept
(pytorch/pytorch#168175), unless `TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoaccum.devices.simulated.cards import Card

Numbers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory that a kernel takes beside its tensors, as one block.

    Attributes:
        bytes: What is likely asked from the allocator; 0 when the kernel needs none at this size.
        band_bytes: By how much that may be wrong, either way.
        measured: Whether the bytes are known. For most rules that is the formula of PyTorch's source, read there and
            worked out by hand, which nobody has compared with a card; False for a guess, which has a band.
        optional: Whether the kernel, or another one in its place, does without where no memory is left.
    """

    bytes: int
    band_bytes: int = 0
    measured: bool = True
    optional: bool = False


Rule = Callable[[Numbers, Card, tuple[int, int]], Estimate]


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return ceil_div(value, multiple) * multiple


def power_below(number: int) -> int:
    """The largest power of two that is not above it; 1 for what is less."""
    return 1 << max(number.bit_length() - 1, 0)


_SMALL, _LARGE = 8_519_680, 32 << 20
_UNSET = -1


def product(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuBLAS. Numbers: the thread (0 forward, 1 backward), bytes that were configured or -1."""
    _, configured = numbers
    if configured != _UNSET:
        return Estimate(bytes=configured)
    major = card.capability[0]
    if card.capability == (9, 0):
        return Estimate(bytes=_LARGE)
    if major < 9 or torch_version <= (2, 11):
        return Estimate(bytes=_SMALL)
    if torch_version >= (2, 15):
        return Estimate(bytes=_LARGE if major <= 12 else _SMALL)
    return Estimate(bytes=_LARGE, band_bytes=_LARGE - _SMALL, measured=False)


def product_with_bias(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuBLASLt. Numbers: the thread (0 forward, 1 backward), bytes that were configured or -1."""
    _, configured = numbers
    return Estimate(bytes=1 << 20 if configured == _UNSET else configured)


def configured_bytes(environment: Mapping[str, str]) -> int:
    """Return what `CUBLAS_WORKSPACE_CONFIG` asks for, -1 when it is not set or not understood.

    >>> configured_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), configured_bytes({})
    (33554432, -1)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else _UNSET


def configured_lt_bytes(environment: Mapping[str, str]) -> int:
    """Return what `CUBLASLT_WORKSPACE_SIZE` (in KiB) asks for, -1 when it is not set or not understood.

    >>> configured_lt_bytes({"CUBLASLT_WORKSPACE_SIZE": "2048"})
    2097152
    """
    match = re.match(r"\s*([0-9]+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(match[1]) * 1024 if match else _UNSET


def keeps_workspace(environment: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    """Return whether a workspace stays once it was needed."""
    if torch_version < (2, 15):
        return True
    return bool(_flag(environment, "TORCH_CUBLAS_WORKSPACE_CACHE"))


def shares_workspace(environment: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    """Return whether cuBLASLt takes what cuBLAS keeps (`unified_cublas_and_lt_workspaces`)."""
    asked = _flag(environment, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return torch_version >= (2, 12) if asked is None else asked


def _flag(environment: Mapping[str, str], name: str) -> bool | None:
    """A switch as c10/util/env.cpp, `check_env`, reads it: None where it is not set, or to what is no switch."""
    value = environment.get(name, "").upper()
    if value in ("1", "ON", "YES", "TRUE", "Y"):
        return True
    return False if value in ("0", "OFF", "NO", "FALSE", "N") else None
