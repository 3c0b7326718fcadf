"""Gradients of embeddings, index_put, sort and scans as on a card: their workspaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from autoaccum.simulation.operators.workspaces import Handler, OperatorCall, accumulator_bytes, layout_copies
from autoaccum.simulation.trace_records import Freed, MemoryStep, OutputAllocated, Workspace
from autoaccum.simulation.unsupported import UnsupportedError

_BAG_OF_MAXIMA = 2
_SMALL_SORT = 4096
"""The longest row that one block of threads sorts (ATen/native/cuda/Sort.cu)."""
_MANY_INDICES = 3073
"""The least number of indices that the gradient of an embedding sorts (ATen/native/cuda/Embedding.cu)."""


def _refuse_sparse(*_: Any) -> NoReturn:
    raise UnsupportedError("an embedding has sparse gradients, which cannot be simulated", hint="use sparse=False")


def _bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, *rest: Any
) -> Tensor:
    """Run `_embedding_bag_backward` in ATen/native/EmbeddingBag.cpp."""
    largest, num_weights, by_frequency, mode, sparse, *weights_and_padding = rest
    if sparse:
        _refuse_sparse()
    options = largest, num_weights, by_frequency, mode, *weights_and_padding
    out: Tensor = torch.ops.aten._embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, *options)
    return out


KERNELS: Mapping[str, Callable[..., Any]] = {
    "embedding_sparse_backward": _refuse_sparse,
    "_embedding_bag_backward": _bag_backward,
}


def _embedding_gradient(call: OperatorCall) -> list[MemoryStep]:
    grad, indices = call["grad_output"], call["indices"]
    least = 1 if call["scale_grad_by_freq"] else _MANY_INDICES
    return layout_copies(grad, indices) + _embedding(grad, indices, call["num_weights"], least)


def _embedding_bag_gradient(call: OperatorCall) -> list[MemoryStep]:
    if call["mode"] == _BAG_OF_MAXIMA:
        return []
    return _embedding(call["grad"], call["indices"], call["num_weights"], least=1)


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
    accumulate = call["accumulate"] or call.deterministic
    if not accumulate or any(str(index.dtype) in ("torch.bool", "torch.uint8") for index in indices):
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
    return [copies, pairs] if columns > _SMALL_SORT else [copies]


def _scan(call: OperatorCall) -> list[Workspace]:
    tensor = call.first
    single = tensor.dim() and tensor.shape[call["dim"]] == tensor.numel()
    return [Workspace("scan", (tensor.numel(),))] if single else []


WORKSPACES: Mapping[str, Handler] = {
    "embedding_dense_backward": _embedding_gradient,
    **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), _embedding_bag_gradient),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    "sort": _sort,
    **dict.fromkeys(("cumsum", "cumprod"), _scan),
}
