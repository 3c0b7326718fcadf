"""cuBLAS: a workspace per handle, or per product from torch 2.15 on.

ATen/cuda/CublasHandlePool.cpp. Up to 2.14 a workspace is kept for each (handle, stream): one for the thread that runs
forward passes, one for autograd's. From 2.15 on it is allocated for each product and freed, unless
`TORCH_CUBLAS_WORKSPACE_CACHE=1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.scratch.estimates import Estimate, Numbers

_SOURCE = "ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize"
_LT_SOURCE = "ATen/cuda/CublasHandlePool.cpp, parseCUDABlasLtWorkspaceSize"
_SMALL, _LARGE = 8_519_680, 32 << 20
_UNSET = -1


def product(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuBLAS. Numbers: the thread (0 forward, 1 backward), bytes that were configured or -1."""
    _, configured = numbers
    if configured != _UNSET:
        return Estimate(bytes=configured, source="CUBLAS_WORKSPACE_CONFIG")
    major = card.capability[0]
    if card.capability == (9, 0):
        return Estimate(bytes=_LARGE, source=_SOURCE)
    if major < 9 or torch_version <= (2, 11):
        return Estimate(bytes=_SMALL, source=_SOURCE)
    if torch_version >= (2, 15):
        return Estimate(bytes=_LARGE if major <= 12 else _SMALL, source=_SOURCE)
    return Estimate(bytes=_LARGE, band_bytes=_LARGE - _SMALL, source=_SOURCE, measured=False)


def product_with_bias(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuBLASLt from 2.15 on. Numbers: bytes that were configured or -1."""
    return Estimate(bytes=1 << 20 if numbers[0] == _UNSET else numbers[0], source=_LT_SOURCE)


def configured_bytes(environment: Mapping[str, str]) -> int:
    """What `CUBLAS_WORKSPACE_CONFIG` asks for, -1 when it is not set or not understood.

    >>> configured_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), configured_bytes({})
    (33554432, -1)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else _UNSET


def configured_lt_bytes(environment: Mapping[str, str]) -> int:
    """What `CUBLASLT_WORKSPACE_SIZE` (in KiB) asks for, -1 when it is not set or not understood.

    >>> configured_lt_bytes({"CUBLASLT_WORKSPACE_SIZE": "2048"})
    2097152
    """
    match = re.match(r"\s*([0-9]+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(match[1]) * 1024 if match else _UNSET


def keeps_workspace(environment: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    """Whether a workspace stays once it was needed."""
    if torch_version < (2, 15):
        return True
    return environment.get("TORCH_CUBLAS_WORKSPACE_CACHE", "").upper() in ("1", "ON", "YES", "TRUE", "Y")
