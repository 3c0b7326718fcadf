"""Gradients of embeddings, index_put, sort and scans: the workspaces of their kernels.

Their sizes are in indexing_workspace.py; gradients of `nn.Embedding(sparse=True)` are in sparse_gradients.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from autoaccum.devices.simulated.operators.indexing_workspace import SMALL_SORT, index_threshold
from autoaccum.devices.simulated.operators.operator_call import Handler, OperatorCall, accumulator_bytes, layout_copies
from autoaccum.devices.simulated.trace import Freed, MemoryStep, OutputAllocated, Workspace

_BAG_OF_MAXIMA = 2


def _embedding_gradient(call: OperatorCall) -> list[MemoryStep]:
    grad, indices = call["grad_output"], call["indices"]
    least = 1 if call["scale_grad_by_freq"] else index_threshold(bag=False)
    return layout_copies(grad, indices) + _embedding(grad, indices, call["num_weights"], least)


def _embedding_bag_gradient(call: OperatorCall) -> list[MemoryStep]:
    if call["mode"] == _BAG_OF_MAXIMA:
        return []
    return _embedding(call["grad"], call["indices"], call["num_weights"], index_threshold(bag=True))


def _embedding(grad: Tensor, indices: Tensor, rows: int, least: int) -> list[MemoryStep]:
    """Sort the indices, allocate the gradient, then add up each run of equal indices in parts."""
    count, each = indices.numel(), indices.dtype.itemsize
    sums = Workspace("embedding_sums", (count, rows, grad.shape[-1], accumulator_bytes(grad.dtype), least))
    names = ("indices", "segments", "partials")
    one, segment, partials = (Workspace(f"embedding_{name}", (count, rows, each, least)) for name in names)
    temporary = Workspace("sorted_pairs", (count, 2 * each, least))
    sorting: list[MemoryStep] = [one, one, one, temporary, Freed(2), OutputAllocated()]
    return [*sorting, one, segment, segment, partials, sums]


def _index_put(call: OperatorCall) -> list[MemoryStep]:
    """Only sums need sorted indices. The number of indices in a mask is not known."""
    indices = [index for index in call["indices"] if index is not None]
    accumulate = call["accumulate"] or torch.are_deterministic_algorithms_enabled()
    if not accumulate or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    shapes = (reversed(index.shape) for index in indices)
    count = prod(map(max, zip_longest(*shapes, fillvalue=1)))
    one = Workspace("index_put", (count,))
    copies = layout_copies(call["self"])
    return [*copies, one, one, Freed(), one, one, one, Workspace("sorted_pairs", (count, 16, 0))]


def _sort(call: OperatorCall) -> list[Workspace]:
    tensor = call.first
    columns = tensor.shape[call["dim"]] if tensor.dim() else 0
    if not columns:
        return []
    count, each = tensor.numel(), tensor.dtype.itemsize
    pairs = Workspace("sorted_pairs", (count, each + 8, 0))
    copies = Workspace("sort", (count // columns, columns, each))
    return [copies, pairs] if columns > SMALL_SORT else [copies]


def _scan(call: OperatorCall) -> list[Workspace]:
    tensor = call.first
    single = tensor.dim() and tensor.shape[call["dim"]] == tensor.numel()
    return [Workspace("scan", (tensor.numel(),))] if single else []


WORKSPACES: Mapping[str, Handler] = MappingProxyType(
    {
        "embedding_dense_backward": _embedding_gradient,
        **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), _embedding_bag_gradient),
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
        "sort": _sort,
        **dict.fromkeys(("cumsum", "cumprod"), _scan),
    }
)
