"""Matrix products: the workspaces of cuBLAS and cuBLASLt that each product uses.

Their sizes are in matmul_workspace.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autoaccum.devices.simulated.operators.matmul_workspace import (
    configured_bytes,
    configured_lt_bytes,
    keeps_workspace,
    shares_workspace,
)
from autoaccum.devices.simulated.operators.operator_call import bytes_of
from autoaccum.devices.simulated.trace import Workspace

WITH_BIAS = ("addmm", "_addmm_activation")
_OTHERS = ("mm", "bmm", "addmm_", "baddbmm_", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "_scaled_mm")
PRODUCTS = (*WITH_BIAS, *_OTHERS)


class Cublas:
    """The way in which cuBLAS takes workspaces, by the environment variables and the PyTorch release."""

    def __init__(self, environment: Mapping[str, str], torch_version: tuple[int, int]) -> None:
        self._keeps = keeps_workspace(environment, torch_version)
        self._shares = shares_workspace(environment, torch_version)
        self._bytes, self._lt_bytes = configured_bytes(environment), configured_lt_bytes(environment)

    def workspaces(
        self, args: Sequence[Any], *, with_bias: bool, thread: int
    ) -> tuple[list[Workspace], list[Workspace]]:
        """Return the workspaces of a product on a thread (0 forward, 1 backward): those it frees, those that stay."""
        copies = [Workspace("layout_copy", (bytes_of(arg),)) for arg in args if _needs_copy(arg)]
        uses_lt = with_bias and _uses_cublaslt(args)
        if self._keeps:
            resident = [Workspace("product", (thread, self._bytes))]
            if uses_lt and not self._shares:
                resident.append(Workspace("product_with_bias", (thread, self._lt_bytes)))
            return copies, resident
        own = Workspace("product_with_bias", (0, self._lt_bytes)) if uses_lt else Workspace("product", (0, self._bytes))
        return [*copies, own], []


def _needs_copy(tensor: Any) -> bool:
    """Return whether cuBLAS cannot read its layout (`prepare_matrix_for_cublas` in ATen/native/cuda/Blas.cpp)."""
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return False
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    return not ((across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)))


def _uses_cublaslt(args: Sequence[Any]) -> bool:
    """Return whether a product with a bias runs in cuBLASLt (`isInputCompliesAddmmCudaLt` in Blas.cpp)."""
    bias, left, right = args[:3]
    return bool(bias.dim() == 1 and bias.is_contiguous() and left.shape[1] > 1 and right.shape[1] > 1)
