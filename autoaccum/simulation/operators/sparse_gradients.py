"""Sparse gradients of `nn.Embedding` and `nn.EmbeddingBag`, and what accumulation and optimizers do to them.

Of sparse tensors, PyTorch's fake tensors keep the layout, but not indices and values. They are kept here as two
dense tensors, and operators do to them what they do on a card (ATen/native/sparse). The number of different indices
depends on values: the largest number is assumed, which takes the most memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoaccum.simulation.trace_records import Workspace
from autoaccum.simulation.unsupported import UnsupportedError

_PARTS = "_autoaccum_parts"
_LEAF = "AccumulateGrad"
_MEAN = 1
"""The mode of `nn.EmbeddingBag` that averages."""
_WAY_OUT = "take SparseAdam, or SGD or Adagrad without momentum and decay; or sparse=False"
_aten = torch.ops.aten
MAKES_SPARSE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
MakeSparse = Callable[[Sequence[int], Tensor, Tensor], Tensor]
"""Makes an empty sparse tensor of a size on the card, with the ranks of indices and values."""


@dataclass(frozen=True)
class _Parts:
    """Indices of shape (1, n) and values of shape (n, columns)."""

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
    """Run an operator that takes or makes sparse tensors; `allocate` is called with each workspace.

    Raises:
        UnsupportedError: The operator is not one of those that accumulation, SGD, Adagrad and SparseAdam use.
    """

    def sparse(size: Sequence[int], parts: _Parts) -> Tensor:
        tensor = make(size, parts.indices, parts.values)
        setattr(tensor, _PARTS, parts)
        return tensor

    if func is MAKES_SPARSE:
        return sparse(args[2], _Parts(args[3], args[4], bool(kwargs.get("is_coalesced"))))
    name, first = func.overloadpacket.__name__, args[0]
    parts, other = (getattr(arg, _PARTS, None) for arg in (*args, None)[:2])
    with torch.no_grad():
        match name, parts, other:
            case "add_", None, _:
                return first  # By `index_add_`, in place (`add_out_dense_sparse_cuda`).
            case "sparse_mask", None, _Parts() as mask:
                return sparse(first.shape, _masked(first, mask))
            case "add" | "add_", _Parts(), _Parts():
                # Both are concatenated; equal indices are added up only by `coalesce` (`add_out_sparse_cuda`).
                joined = _Parts(_aten.cat([parts.indices, other.indices], 1), _aten.cat([parts.values, other.values]))
                if name == "add":
                    return sparse(first.shape, joined)
                setattr(first, _PARTS, joined)
                return first
            case "_coalesced_", _Parts(), _:
                setattr(first, _PARTS, replace(parts, coalesced=bool(args[1])))
                return first
            case "_coalesce" | "coalesce", _Parts(), _:
                return first if parts.coalesced else sparse(first.shape, _coalesced(parts, first.shape[0], allocate))
            case "detach" | "alias", _Parts(), _:
                return sparse(first.shape, parts)
            case "clone", _Parts(), _:
                return sparse(first.shape, _cloned(parts))
            case _, _Parts(), _ if name in _ACCESSORS:
                return _ACCESSORS[name](parts)
    raise UnsupportedError(f"{func} of a sparse gradient is not simulated", hint=_WAY_OUT)


def _coalesced(parts: _Parts, rows: int, allocate: Callable[[Workspace], None]) -> _Parts:
    """Sort indices and allocate sums (`_coalesce_sparse_cuda` in ATen/native/sparse/cuda/SparseCUDATensor.cu)."""
    count = parts.indices.shape[1]
    if count < 2:
        return _Parts(_aten.clone(parts.indices), _aten.clone(parts.values), coalesced=True)
    values, indices = _aten.contiguous(parts.values), _aten.clone(parts.indices)
    places = [_aten.empty_like(parts.indices) for _ in range(2)]
    allocate(Workspace("sorted_pairs", (count, 16, 0)))
    least = min(count, rows)
    summed = _aten.new_empty(values, (least, *values.shape[1:]))
    del places
    return _Parts(_aten.slice(indices, 1, 0, least), summed, coalesced=True)


def _masked(dense: Tensor, mask: _Parts) -> _Parts:
    """Gather rows, then multiply them by ones (`sparse_mask` in ATen/native/sparse/SparseTensor.cpp)."""
    gathered = _aten.index_select(dense, 0, _aten.select(mask.indices, 0, 0))
    return _Parts(_aten.clone(mask.indices), _aten.mul(gathered, gathered), mask.coalesced)


def _cloned(parts: _Parts) -> _Parts:
    """Return a copy; a leaf keeps its first gradient as it is (accumulate_grad.h), which fake tensors do not show."""
    node: Any = torch._C._current_autograd_node()
    if node is not None and type(node).__name__ == _LEAF:
        return parts
    return _Parts(_aten.clone(parts.indices), _aten.clone(parts.values), parts.coalesced)


_ACCESSORS: Mapping[str, Callable[[_Parts], Any]] = {
    "_nnz": lambda parts: parts.indices.shape[1],
    "is_coalesced": lambda parts: parts.coalesced,
    **dict.fromkeys(("_indices", "indices"), lambda parts: _aten.alias(parts.indices)),
    **dict.fromkeys(("_values", "values"), lambda parts: _aten.alias(parts.values)),
}


def _embedding_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Run `embedding_sparse_backward` in ATen/native/Embedding.cpp."""
    if scale_grad_by_freq:
        raise RuntimeError("embedding_backward: scale_grad_by_freq not supported with sparse gradients")
    if padding_idx != -1:
        indices, grad = indices.clone(), grad.clone()
    rows, columns = indices.reshape(1, -1).long(), grad.shape[-1]
    made: Tensor = _aten._sparse_coo_tensor_unsafe.default(rows, grad.reshape(-1, columns), (num_weights, columns))
    return made


def _bag_backward(grad: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, bag_size: Tensor, *rest: Any) -> Tensor:
    """Run `_embedding_bag_backward` and `_embedding_bag_sparse_backward` in ATen/native/EmbeddingBag.cpp."""
    largest, num_weights, by_frequency, mode, sparse, weights, padding_idx = rest if len(rest) > 6 else (*rest, -1)
    if not sparse:
        options = largest, num_weights, by_frequency, mode, weights, padding_idx
        dense: Tensor = _aten._embedding_bag_dense_backward(grad, indices, bags, bag_size, *options)
        return dense
    rows = grad.index_select(0, bags)
    if mode == _MEAN:
        rows = rows * bag_size.to(rows.dtype).reciprocal().unsqueeze(1).index_select(0, bags)
    if weights is not None:
        rows.mul_(weights.unsqueeze(1))
    return _embedding_backward(rows, indices, num_weights, padding_idx, by_frequency)


KERNELS: Mapping[str, Callable[..., Any]] = {
    "embedding_sparse_backward": _embedding_backward,
    "_embedding_bag_backward": _bag_backward,
}
"""Operators that make a sparse gradient. They drop padding by its value; here all rows are kept."""
