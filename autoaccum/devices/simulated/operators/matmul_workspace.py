"""Workspaces of cuBLAS and cuBLASLt, and the environment variables that configure them.

Source: `parseChosenWorkspaceSize` and `parseCUDABlasLtWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp. Up to 2.14, one
workspace is kept for each (handle, stream): one for the thread of forward passes, one for autograd's. From 2.15 on, it
is allocated for each product and freed again, unless `TORCH_CUBLAS_WORKSPACE_CACHE=1`. cuBLASLt, which adds a bias,
keeps a workspace of its own in 2.11. Later releases let it use the one that cuBLAS keeps (pytorch/pytorch#168175),
unless `TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.operators.workspace_estimate import Estimate, Numbers, by_name

_SMALL, _LARGE = 8_519_680, 32 << 20
_UNSET = -1


def product(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the workspace of cuBLAS. Numbers: thread (0 forward, 1 backward), configured bytes or -1."""
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
    """Return the workspace of cuBLASLt. Numbers: thread (0 forward, 1 backward), configured bytes or -1."""
    _, configured = numbers
    return Estimate(bytes=1 << 20 if configured == _UNSET else configured)


def configured_bytes(environment: Mapping[str, str]) -> int:
    """Return the bytes that `CUBLAS_WORKSPACE_CONFIG` sets; -1 if it is not set or has another form.

    >>> configured_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), configured_bytes({})
    (33554432, -1)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else _UNSET


def configured_lt_bytes(environment: Mapping[str, str]) -> int:
    """Return the bytes that `CUBLASLT_WORKSPACE_SIZE` (in KiB) sets; -1 if it is not set or has another form.

    >>> configured_lt_bytes({"CUBLASLT_WORKSPACE_SIZE": "2048"})
    2097152
    """
    match = re.match(r"\s*([0-9]+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(match[1]) * 1024 if match else _UNSET


def keeps_workspace(environment: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    """Return whether a workspace stays allocated after its first use."""
    if torch_version < (2, 15):
        return True
    return bool(_flag(environment, "TORCH_CUBLAS_WORKSPACE_CACHE"))


def shares_workspace(environment: Mapping[str, str], torch_version: tuple[int, int]) -> bool:
    """Return whether cuBLASLt uses the workspace that cuBLAS keeps (`unified_cublas_and_lt_workspaces`)."""
    unified = _flag(environment, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return torch_version >= (2, 12) if unified is None else unified


def _flag(environment: Mapping[str, str], name: str) -> bool | None:
    """Read a switch as `check_env` in c10/util/env.cpp does; None if it is not set or is no switch."""
    value = environment.get(name, "").upper()
    if value in ("1", "ON", "YES", "TRUE", "Y"):
        return True
    return False if value in ("0", "OFF", "NO", "FALSE", "N") else None


RULES = by_name(product, product_with_bias)
