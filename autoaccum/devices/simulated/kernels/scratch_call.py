"""Memory of reductions and indexing beside their tensors: which rule, by which numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.scratch.layers import index_threshold
from autoaccum.devices.simulated.scratch.reductions import reduction_layout, reduction_numbers
from autoaccum.devices.simulated.trace import Freed, MemoryStep, OutputAllocated, Workspace

Handler = Callable[["Call"], Sequence[MemoryStep]]
Signature = Mapping[str, tuple[int, Any]]


@dataclass(frozen=True)
class Call:
    """An operator with what it took and returned; `signature` has the position and default of each parameter."""

    signature: Signature
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    torch_version: tuple[int, int]

    def __getitem__(self, name: str) -> Any:
        """The argument `name`, or its default; None where the overload has no such parameter."""
        position, default = self.signature.get(name, (len(self.args), None))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @cached_property
    def first(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return tensor


def after(copies: Sequence[Workspace], call: Call) -> list[MemoryStep]:
    """Copies, then what the operator returns: its inputs are laid out first."""
    if not copies:
        return []
    count = len(call.out) if isinstance(call.out, list | tuple) else 1
    return [*copies, *map(OutputAllocated, range(count))]


def bytes_of(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.dtype.itemsize


def layout_copies(
    *tensors: Tensor | None, memory_format: torch.memory_format = torch.contiguous_format
) -> list[Workspace]:
    """A copy for each tensor that is not laid out as the kernel wants it."""
    return [
        Workspace("layout_copy", (bytes_of(tensor),))
        for tensor in tensors
        if isinstance(tensor, Tensor) and not tensor.is_contiguous(memory_format=memory_format)
    ]


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Bytes of what values of `dtype` are summed in (ATen/AccumulateType.h)."""
    return max(4, dtype.itemsize)


def reductions(
    tensor: Tensor, dims: Sequence[int], *, accumulator: int, element_bytes: int | None = None, unroll: int = 4
) -> list[Workspace]:
    """Return what a reduction of `tensor` over `dims` (all when there are none) takes."""
    count = tensor.dim()
    reduced = {dim % count for dim in dims} if dims and count else set(range(count))
    numbers = reduction_numbers(
        reduction_layout(tensor.shape, tensor.stride(), reduced),
        accumulator_bytes=accumulator,
        element_bytes=element_bytes or tensor.dtype.itemsize,
        unroll=unroll,
    )
    return [Workspace("reduction", numbers), Workspace("reduction_flags", numbers)]


_HALF = (torch.float16, torch.bfloat16)
_FAST_NORMS = (1, 2, float("inf"))


def _total(call: Call) -> list[Workspace]:
    """Sums, means, products and norms: integers are cast first, half precision is summed in fp32 as it is."""
    tensor, out = call.first, call.out
    cast = tensor.dtype != out.dtype and not (tensor.dtype in _HALF and out.dtype == torch.float32)
    element = out.dtype.itemsize if cast else tensor.dtype.itemsize
    copies = [Workspace("cast_copy", (tensor.numel() * element,))] if cast else []
    return copies + reductions(tensor, _dims(call), accumulator=accumulator_bytes(out.dtype), element_bytes=element)


def _moments(call: Call) -> list[Workspace]:
    """Mean, squares and two counts at once (ATen/native/SharedReduceOps.h, WelfordData), two values unrolled."""
    accumulator = 16 if accumulator_bytes(call.first.dtype) == 4 else 32
    return reductions(call.first, _dims(call), accumulator=accumulator, unroll=2)


def _extreme(call: Call) -> list[Workspace]:
    if "other" in call.signature:
        return []
    indexed = isinstance(call.out, tuple) or call.out.dtype == torch.int64 != call.first.dtype
    return reductions(call.first, _dims(call), accumulator=16 if indexed else accumulator_bytes(call.first.dtype))


def _logsumexp(call: Call) -> list[Workspace]:
    tensor = call.first
    difference = Workspace("difference", (bytes_of(tensor),))
    return [difference, *reductions(tensor, _dims(call), accumulator=accumulator_bytes(tensor.dtype))]


def _loss(call: Call) -> list[Workspace]:
    if call["reduction"] == 0:
        return []
    tensor = call.first
    losses = Workspace("loss_elements", (bytes_of(tensor),))
    return [losses, *reductions(tensor, (), accumulator=accumulator_bytes(tensor.dtype))]


def _whole_losses(call: Call) -> list[tuple[int, Workspace]]:
    """The loss keeps the memory of as many as there are elements: it is made so large, and then resized.

    ATen/native/BinaryOps.cpp, TORCH_META_FUNC of `mse_loss` and `smooth_l1_loss`.
    """
    return [(0, Workspace("loss_elements", (bytes_of(call.first),)))] if call["reduction"] else []


def _loss_with_logits(call: Call) -> list[Workspace]:
    """The logarithm of the sigmoid lives beside the losses."""
    return [Workspace("loss_elements", (bytes_of(call.first),)), *_loss(call)]


def _softmax(call: Call) -> list[Workspace]:
    return layout_copies(call["self"], call["grad_output"], call["output"])


def _softmax_gradient(call: Call) -> list[Workspace]:
    """The output times its gradient, laid out as the kernel wants it."""
    grad, output = call["grad_output"], call["output"]
    product = Workspace("softmax_product", (output.numel() * max(grad.dtype.itemsize, output.dtype.itemsize),))
    return [product, *layout_copies(grad), *layout_copies(output)]


def _foreach_norm(call: Call) -> list[Workspace]:
    tensors: Sequence[Tensor] = call["self"]
    if not tensors or call["ord"] not in _FAST_NORMS or len({tensor.dtype for tensor in tensors}) > 1:
        return []
    largest = max(tensor.numel() for tensor in tensors)
    return [Workspace("foreach_norm", (len(tensors), largest, accumulator_bytes(tensors[0].dtype)))]


def _dims(call: Call) -> Sequence[int]:
    dim = call["dim"]
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


REDUCTION_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        **dict.fromkeys(("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm"), _total),
        **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _moments),
        **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), _extreme),
        **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"), _loss),
        **dict.fromkeys(("_softmax", "_log_softmax", "_log_softmax_backward_data"), _softmax),
        "_softmax_backward_data": _softmax_gradient,
        "binary_cross_entropy_with_logits": _loss_with_logits,
        "logsumexp": _logsumexp,
        "_foreach_norm": _foreach_norm,
    }
)
KEPT_LOSSES: Mapping[str, Callable[[Call], list[tuple[int, Workspace]]]] = MappingProxyType(
    dict.fromkeys(("mse_loss", "smooth_l1_loss"), _whole_losses)
)


_BAG_OF_MAXIMA = 2
_SMALL_SORT = 4096
"""So long a row is sorted by one block of threads (ATen/native/cuda/Sort.cu)."""


def _embedding_gradient(call: Call) -> list[MemoryStep]:
    grad, indices = call["grad_output"], call["indices"]
    least = 1 if call["scale_grad_by_freq"] else index_threshold(bag=False)
    return layout_copies(grad, indices) + _embedding(grad, indices, call["num_weights"], least)


def _embedding_bag_gradient(call: Call) -> list[MemoryStep]:
    if call["mode"] == _BAG_OF_MAXIMA:
        return []
    return _embedding(call["grad"], call["indices"], call["num_weights"], index_threshold(bag=True))


def _embedding(grad: Tensor, indices: Tensor, rows: int, least: int) -> list[MemoryStep]:
    """Indices are sorted, the gradient is made, then each run of equal ones is summed up in parts."""
    count, each = indices.numel(), indices.dtype.itemsize
    sums = Workspace("embedding_sums", (count, rows, grad.shape[-1], accumulator_bytes(grad.dtype), least))
    names = ("indices", "segments", "partials")
    one, segment, partials = (Workspace(f"embedding_{name}", (count, rows, each, least)) for name in names)
    temporary = Workspace("sorted_pairs", (count, 2 * each, least))
    in_order: list[MemoryStep] = [one, one, one, temporary, Freed(2), OutputAllocated()]
    return [*in_order, one, segment, segment, partials, sums]


def _index_put(call: Call) -> list[MemoryStep]:
    """Only sums need their indices sorted; a mask's count of indices is not known."""
    indices = [index for index in call["indices"] if index is not None]
    accumulate = call["accumulate"] or torch.are_deterministic_algorithms_enabled()
    if not accumulate or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    shapes = (reversed(index.shape) for index in indices)
    count = prod(map(max, zip_longest(*shapes, fillvalue=1)))
    one = Workspace("index_put", (count,))
    copies = layout_copies(call["self"])
    return [*copies, one, one, Freed(), one, one, one, Workspace("sorted_pairs", (count, 16, 0))]


def _sort(call: Call) -> list[Workspace]:
    tensor = call.first
    columns = tensor.shape[call["dim"]] if tensor.dim() else 0
    if not columns:
        return []
    count, each = tensor.numel(), tensor.dtype.itemsize
    pairs = Workspace("sorted_pairs", (count, each + 8, 0))
    copies = Workspace("sort", (count // columns, columns, each))
    return [copies, pairs] if columns > _SMALL_SORT else [copies]


def _scan(call: Call) -> list[Workspace]:
    tensor = call.first
    single = tensor.dim() and tensor.shape[call["dim"]] == tensor.numel()
    return [Workspace("scan", (tensor.numel(),))] if single else []


def _ctc_gradient(call: Call) -> list[Workspace]:
    return [Workspace("ctc_gradient", (bytes_of(call["log_alpha"]),))]


INDEXING_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "embedding_dense_backward": _embedding_gradient,
        **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), _embedding_bag_gradient),
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
        "sort": _sort,
        **dict.fromkeys(("cumsum", "cumprod"), _scan),
        "_ctc_loss_backward": _ctc_gradient,
    }
)
