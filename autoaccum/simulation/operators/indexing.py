"""Gradients of embeddings as on a card, dense and sparse ones; index_put, sort and scans.

Of sparse tensors, PyTorch's fake tensors keep the layout, but not indices and values. They are kept here as two
dense tensors, and operators do to them what they do on a card (ATen/native/sparse). The number of different indices
depends on values: the largest number is assumed, which takes the most memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoaccum.simulation.operators.workspaces import Handler, OperatorCall, accumulator_bytes, layout_copies
from autoaccum.simulation.trace_records import Freed, MemoryStep, OutputAllocated, Workspace
from autoaccum.simulation.unsupported import UnsupportedError

_PARTS = "_autoaccum_parts"
_LEAF = "AccumulateGrad"
_BAG_OF_MAXIMA = 2
_SMALL_SORT = 4096
"""The longest row that one block of threads sorts (ATen/native/cuda/Sort.cu)."""
_MANY_INDICES = 3073
"""The least number of indices that the gradient of an embedding sorts (ATen/native/cuda/Embedding.cu)."""
_MEAN = 1
"""The mode of `nn.EmbeddingBag` that averages."""
_WAY_OUT = "take SparseAdam, or SGD or Adagrad without momentum and decay; or sparse=False"
_aten = torch.ops.aten
MAKES_SPARSE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
MakeSparse = Callable[[Sequence[int], Tensor, Tensor], Tensor]
"""Makes an empty sparse tensor of a size on the card, with the ranks of indices and values."""


@dataclass(frozen=True)
class _Parts:
    indices: Tensor
    values: Tensor
    coalesced: bool = False


def has_parts(args: Sequence[Any]) -> bool:
    """Return whether one of `args` is a sparse tensor or contains one."""
    return any(
        has_parts(arg) if isinstance(arg, list | tuple) else _PARTS in getattr(arg, "__dict__", ()) for arg in args
    )


def run_sparse(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], make: MakeSparse, allocate: Callable[[Workspace], None]
) -> Any:
    """Run an operator that takes or makes sparse tensors; `allocate` is called with each workspace."""

    def shell(size: Sequence[int], parts: _Parts) -> Tensor:
        made = make(size, parts.indices, parts.values)
        setattr(made, _PARTS, parts)
        return made

    if func is MAKES_SPARSE:
        size, indices, values = args[2:5]
        return shell(size, _Parts(indices, values, bool(kwargs.get("is_coalesced"))))
    name = func.overloadpacket.__name__
    with torch.no_grad():
        parts: _Parts | None = getattr(args[0], _PARTS, None)
        if parts is None and name == "add_":
            return args[0]  # By `index_add_`, in place (`add_out_dense_sparse_cuda`).
        if parts is None and name == "sparse_mask":
            return shell(args[0].shape, _masked(args[0], getattr(args[1], _PARTS)))
        if parts is not None and name in _ACCESSORS:
            return _ACCESSORS[name](parts)
        if parts is not None and name in ("add", "add_") and has_parts(args[1:2]):
            other: _Parts = getattr(args[1], _PARTS)
            # Both are concatenated; equal indices are added up only by `coalesce` (`add_out_sparse_cuda`).
            joined = _Parts(_aten.cat([parts.indices, other.indices], 1), _aten.cat([parts.values, other.values]))
            if name == "add":
                return shell(args[0].shape, joined)
            setattr(args[0], _PARTS, joined)
            return args[0]
        if parts is not None and name == "_coalesced_":
            setattr(args[0], _PARTS, replace(parts, coalesced=bool(args[1])))
            return args[0]
        if parts is not None and name in ("_coalesce", "coalesce"):
            return args[0] if parts.coalesced else shell(args[0].shape, _coalesced(parts, args[0].shape[0], allocate))
        if parts is not None and name in ("detach", "alias"):
            return shell(args[0].shape, parts)
        if parts is not None and name == "clone":
            return shell(args[0].shape, _cloned(parts))
    raise UnsupportedError(f"{func} of a sparse gradient is not simulated", hint=_WAY_OUT)


def _coalesced(parts: _Parts, rows: int, allocate: Callable[[Workspace], None]) -> _Parts:
    """Sort indices and allocate sums (`_coalesce_sparse_cuda` in ATen/native/sparse/cuda/SparseCUDATensor.cu)."""
    count = parts.indices.shape[1]
    if count < 2:
        return _Parts(_aten.clone(parts.indices), _aten.clone(parts.values), coalesced=True)
    values = _aten.contiguous(parts.values)
    indices = _aten.clone(parts.indices)
    places = [_aten.empty_like(parts.indices) for _ in range(2)]
    allocate(Workspace("sorted_pairs", (count, 16, 0)))
    least = min(count, rows)
    summed = _aten.new_empty(values, (least, *values.shape[1:]))
    del places
    return _Parts(_aten.slice(indices, 1, 0, least), summed, coalesced=True)


def _masked(dense: Tensor, mask: _Parts) -> _Parts:
    """Gather rows, then multiply them by ones (`sparse_mask` in ATen/native/sparse/SparseTensor.cpp)."""
    gathered = _aten.index_select(dense, 0, _aten.select(mask.indices, 0, 0))
    indices = _aten.clone(mask.indices)
    return _Parts(indices, _aten.mul(gathered, gathered), mask.coalesced)


def _cloned(parts: _Parts) -> _Parts:
    """Return a copy; a leaf keeps its first gradient as it is (accumulate_grad.h), which fake tensors do not show."""
    node: Any = torch._C._current_autograd_node()
    if node is not None and type(node).__name__ == _LEAF:
        return parts
    return _Parts(_aten.clone(parts.indices), _aten.clone(parts.values), parts.coalesced)


def _embedding_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Run `embedding_sparse_backward` in ATen/native/Embedding.cpp."""
    if scale_grad_by_freq:
        raise RuntimeError("embedding_backward: scale_grad_by_freq not supported with sparse gradients")
    if padding_idx != -1:
        indices, grad = indices.clone(), grad.clone()
    rows, columns = indices.reshape(1, -1).long(), grad.shape[-1]
    values = grad.reshape(-1, columns)
    made: Tensor = _aten._sparse_coo_tensor_unsafe.default(rows, values, (num_weights, columns))
    return made


def _bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    largest: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """Run `_embedding_bag_backward` and `_embedding_bag_sparse_backward` in ATen/native/EmbeddingBag.cpp."""
    if not sparse:
        rest = num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx
        dense: Tensor = _aten._embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, largest, *rest)
        return dense
    rows = grad.index_select(0, offset2bag)
    if mode == _MEAN:
        rows = rows * bag_size.to(rows.dtype).reciprocal().unsqueeze(1).index_select(0, offset2bag)
    if per_sample_weights is not None:
        rows.mul_(per_sample_weights.unsqueeze(1))
    return _embedding_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


_ACCESSORS: Mapping[str, Callable[[_Parts], Any]] = {
    "_nnz": lambda parts: parts.indices.shape[1],
    "is_coalesced": lambda parts: parts.coalesced,
    **dict.fromkeys(("_indices", "indices"), lambda parts: _aten.alias(parts.indices)),
    **dict.fromkeys(("_values", "values"), lambda parts: _aten.alias(parts.values)),
}
KERNELS: Mapping[str, Callable[..., Any]] = {
    "embedding_sparse_backward": _embedding_backward,
    "_embedding_bag_backward": _bag_backward,
}
"""Operators that make a sparse gradient. They drop padding by its value; here all rows are kept."""


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
