"""Matrix products: the workspaces of cuBLAS and cuBLASLt, and the environment variable that configures them.

Source: `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp. Up to 2.14, one workspace is kept for each
(handle, stream): one for the thread of forward passes, one for autograd's. From 2.15 on, it is allocated for each
product and freed again. cuBLASLt, which adds a bias, keeps a workspace of its own in 2.11. Later releases let it use
the one that cuBLAS keeps (pytorch/pytorch#168175). Other environment variables of theirs are taken to be unset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspaces import Estimate, Numbers, by_name, bytes_of
from autoaccum.simulation.trace_records import Workspace

WITH_BIAS = ("addmm", "_addmm_activation")
_OTHERS = ("mm", "bmm", "addmm_", "baddbmm_", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "_scaled_mm")
PRODUCTS = (*WITH_BIAS, *_OTHERS)
_SMALL, _LARGE = 8_519_680, 32 << 20
_UNSET = -1


class Cublas:
    """The way in which cuBLAS takes workspaces, by the environment variable and the PyTorch release."""

    def __init__(self, environment: Mapping[str, str], torch_version: tuple[int, int]) -> None:
        self._keeps, self._shares = keeps_workspace(torch_version), torch_version >= (2, 12)
        self._bytes = configured_bytes(environment)

    def workspaces(
        self, args: Sequence[Any], *, with_bias: bool, thread: int
    ) -> tuple[list[Workspace], list[Workspace]]:
        """Return the workspaces of a product on a thread (0 forward, 1 backward): those it frees, those that stay."""
        copies = [Workspace("layout_copy", (bytes_of(arg),)) for arg in args if _needs_copy(arg)]
        uses_lt = with_bias and _uses_cublaslt(args)
        if self._keeps:
            resident = [Workspace("product", (thread, self._bytes))]
            if uses_lt and not self._shares:
                resident.append(Workspace("product_with_bias", (thread, _UNSET)))
            return copies, resident
        own = Workspace("product_with_bias", (0, _UNSET)) if uses_lt else Workspace("product", (0, self._bytes))
        return [*copies, own], []


def _needs_copy(tensor: Any) -> bool:
    """Return whether cuBLAS cannot read its layout (`prepare_matrix_for_cublas` in ATen/native/cuda/Blas.cpp)."""
    if not hasattr(tensor, "stride") or tensor.dim() < 2:
        return False
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    return not ((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


def _uses_cublaslt(args: Sequence[Any]) -> bool:
    """Return whether a product with a bias runs in cuBLASLt (`isInputCompliesAddmmCudaLt` in Blas.cpp)."""
    bias, left, right = args[:3]
    return bool(bias.dim() == 1 and bias.is_contiguous() and left.shape[1] > 1 and right.shape[1] > 1)


def product(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuBLAS. Numbers: thread (0 forward, 1 backward), configured bytes or -1."""
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
    """The workspace of cuBLASLt. Numbers: thread (0 forward, 1 backward), -1."""
    return Estimate(bytes=1 << 20)


def configured_bytes(environment: Mapping[str, str]) -> int:
    """Return the bytes that `CUBLAS_WORKSPACE_CONFIG` sets; -1 if it is not set or has another form.

    >>> configured_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}), configured_bytes({})
    (33554432, -1)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else _UNSET


def keeps_workspace(torch_version: tuple[int, int]) -> bool:
    """Return whether a workspace stays allocated after its first use."""
    return torch_version < (2, 15)


RULES = by_name(product, product_with_bias)
