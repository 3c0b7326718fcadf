"""Sums, means, moments, extremes and norms: the workspaces of their kernels.

Their sizes are in reductions_workspace.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from autoaccum.devices.simulated.operators.operator_call import Handler, OperatorCall, accumulator_bytes, bytes_of
from autoaccum.devices.simulated.operators.reductions_workspace import reduction_layout, reduction_numbers
from autoaccum.devices.simulated.trace import Workspace

_HALF = (torch.float16, torch.bfloat16)


def reduction_workspaces(
    tensor: Tensor, dims: Sequence[int], *, accumulator: int, element_bytes: int | None = None, unroll: int = 4
) -> list[Workspace]:
    """Return the workspaces of a reduction of `tensor` over `dims` (over all if there are none)."""
    count = tensor.dim()
    reduced = {dim % count for dim in dims} if dims and count else set(range(count))
    numbers = reduction_numbers(
        reduction_layout(tensor.shape, tensor.stride(), reduced),
        accumulator_bytes=accumulator,
        element_bytes=element_bytes or tensor.dtype.itemsize,
        unroll=unroll,
    )
    return [Workspace("reduction", numbers), Workspace("reduction_flags", numbers)]


def _total(call: OperatorCall) -> list[Workspace]:
    """Sums, means, products and norms: integers are cast first, half precision is summed in fp32 as it is."""
    tensor, out = call.first, call.out
    cast = tensor.dtype != out.dtype and not (tensor.dtype in _HALF and out.dtype == torch.float32)
    element = out.dtype.itemsize if cast else tensor.dtype.itemsize
    copies = [Workspace("cast_copy", (tensor.numel() * element,))] if cast else []
    accumulator = accumulator_bytes(out.dtype)
    return copies + reduction_workspaces(tensor, _dims(call), accumulator=accumulator, element_bytes=element)


def _moments(call: OperatorCall) -> list[Workspace]:
    """Mean, squares and two counts at once (`WelfordData` in ATen/native/SharedReduceOps.h), two values unrolled."""
    accumulator = 16 if accumulator_bytes(call.first.dtype) == 4 else 32
    return reduction_workspaces(call.first, _dims(call), accumulator=accumulator, unroll=2)


def _extreme(call: OperatorCall) -> list[Workspace]:
    """The largest or smallest values, with their indices if those are returned."""
    if "other" in call.signature:
        return []
    indexed = isinstance(call.out, tuple) or call.out.dtype == torch.int64 != call.first.dtype
    accumulator = 16 if indexed else accumulator_bytes(call.first.dtype)
    return reduction_workspaces(call.first, _dims(call), accumulator=accumulator)


def _logsumexp(call: OperatorCall) -> list[Workspace]:
    tensor = call.first
    difference = Workspace("difference", (bytes_of(tensor),))
    return [difference, *reduction_workspaces(tensor, _dims(call), accumulator=accumulator_bytes(tensor.dtype))]


def _dims(call: OperatorCall) -> Sequence[int]:
    dim = call["dim"]
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


WORKSPACES: Mapping[str, Handler] = MappingProxyType(
    {
        **dict.fromkeys(("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm"), _total),
        **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _moments),
        **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), _extreme),
        "logsumexp": _logsumexp,
    }
)
