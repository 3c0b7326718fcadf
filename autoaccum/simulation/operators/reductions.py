"""Reductions (sums, means, norms), sorts, scans and gradients of embeddings: their workspaces.

In that of a reduction, blocks of threads share their results. Sources: ATen/TensorIterator.cpp for the order in which a
reduction walks over its input, and `setReduceConfig` in ATen/native/cuda/Reduce.cuh for its blocks of threads. The
process that replays traces needs this without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.operator_call import (
    Handler,
    OperatorCall,
    Tensor,
    accumulator_bytes,
    before_outputs,
    bytes_of,
    ceil_div,
    layout_copies,
    power_below,
)
from autoaccum.simulation.trace_records import Freed, Kept, MemoryStep, OutputAllocated, Workspace

_BAG_OF_MAXIMA = 2
_SMALL_SORT = 4096
"""The longest row that one block of threads sorts (ATen/native/cuda/Sort.cu)."""
_MANY_SORTS, _VERY_LONG_SORT = 128, 1_000_000
"""The rows from which CUB sorts them as segments, and the length from which one is sorted after the other."""
_MANY_INDICES = 3073
"""The least number of indices that the gradient of an embedding sorts (ATen/native/cuda/Embedding.cu)."""
_HALF = ("torch.float16", "torch.bfloat16")
_MAX_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
_FAST_NORMS = (1, 2, float("inf"))
"""The norms that `_foreach_norm` computes for all tensors at once."""
_MOST_32_BIT = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """The dimensions of an input as a reduction kernel sees them; the first `reduced` ones are reduced."""

    reduced: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class _Dimension:
    size: int
    out: int
    stride: int

    def comes_after(self, other: _Dimension) -> bool | None:
        """Return whether it belongs after `other`; None if nothing decides."""
        if (self.out == 0) != (other.out == 0):
            return other.out == 0
        for mine, theirs in ((self.out, other.out), (self.stride, other.stride)):
            if mine == 0 or theirs == 0:
                continue
            if mine != theirs:
                return mine > theirs
            if self.size > other.size:
                return True
        return None

    def continues(self, inner: _Dimension) -> bool:
        """Return whether it continues where `inner` ends, so that both can be merged."""
        if self.size == 1 or inner.size == 1:
            return True
        return inner.size * inner.out == self.out and inner.size * inner.stride == self.stride


def reduction_layout(shape: Sequence[int], strides: Sequence[int], reduced: Collection[int]) -> Layout:
    """Sort and merge the dimensions of an input that is summed over `reduced` into a new contiguous output.

    `reorder_dimensions` and `coalesce_dimensions` in ATen/TensorIterator.cpp.

    >>> reduction_layout((8, 128, 768), (98304, 768, 1), (0, 1))
    Layout(reduced=1, shape=(1024, 768), strides=(768, 1))
    """
    dimensions = _sorted(_dimensions(shape, strides, reduced))
    merged: list[_Dimension] = []
    for dimension in dimensions:
        if merged and dimension.continues(merged[-1]):
            last = merged[-1]
            if last.size == 1:
                last.out, last.stride = dimension.out, dimension.stride
            last.size *= dimension.size
        else:
            merged.append(dimension)
    count = sum(dimension.out == 0 for dimension in merged)
    return Layout(count, tuple(d.size for d in merged), tuple(d.stride for d in merged))


def _dimensions(shape: Sequence[int], strides: Sequence[int], reduced: Collection[int]) -> list[_Dimension]:
    """Return the dimensions, innermost first, with their strides in the output (0 if they are reduced)."""
    dimensions, step = [], 1
    for index in reversed(range(len(shape))):
        kept = index not in reduced
        dimensions.append(_Dimension(shape[index], step if kept else 0, strides[index]))
        step *= shape[index] if kept else 1
    return dimensions


def _sorted(dimensions: list[_Dimension]) -> list[_Dimension]:
    for index in range(1, len(dimensions)):
        later = index
        for earlier in reversed(range(index)):
            after = dimensions[earlier].comes_after(dimensions[later])
            if after is None:
                continue
            if not after:
                break
            dimensions[earlier], dimensions[later] = dimensions[later], dimensions[earlier]
            later = earlier
    return dimensions


def reduction_numbers(
    layout: Layout, *, accumulator_bytes: int, element_bytes: int, unroll: int = 4
) -> tuple[int, ...]:
    """Return the numbers: bytes of an accumulator and of an input, values read at once, the input's layout."""
    return (accumulator_bytes, element_bytes, unroll, layout.reduced, *layout.shape, *layout.strides)


def staging_and_flags(numbers: Sequence[int], card: Card) -> tuple[int, int]:
    """Return the bytes of the staging area and of the counters."""
    accumulator, element, unroll, reduced, *rest = numbers
    shape, strides = list(rest[: len(rest) // 2]), rest[len(rest) // 2 :]
    if not shape or 0 in shape:
        return 0, 0
    # Halve the input as `TensorIterator::with_32bit_indexing` does; the parts run one after the other.
    while sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) * element >= _MOST_32_BIT:
        widest = max(range(len(shape)), key=lambda dim: (shape[dim] - 1) * strides[dim])
        shape[widest] = ceil_div(shape[widest], 2)
    return _split(Layout(reduced, tuple(shape), tuple(strides)), accumulator, unroll, card)


def _split(layout: Layout, accumulator: int, unroll: int, card: Card) -> tuple[int, int]:
    """Return what a reduction takes if several blocks of threads share its outputs (`setReduceConfig`)."""
    inputs, outputs = prod(layout.shape[: layout.reduced]), prod(layout.shape[layout.reduced :])
    along = layout.reduced == len(layout.shape) or layout.strides[0] < layout.strides[layout.reduced]
    vector = 1 if along else _output_vector(layout)
    width, height = _block(inputs, outputs, vector, along, unroll, layout)
    values = ceil_div(inputs, width) if along else inputs
    if values < min(height * _LEAST_VALUES, _MOST_VALUES):
        return 0, 0
    values = ceil_div(inputs, width * height if along else height)
    grid = ceil_div(outputs // vector, 1 if along else width)
    blocks = card.multiprocessors * (card.threads_per_multiprocessor // (width * height))
    if values < _MOST_VALUES or grid > blocks:
        return 0, 0
    shares = max(min(ceil_div(blocks, grid), ceil_div(values, _LEAST_VALUES)), ceil_div(values, _MOST_VALUES))
    if shares == 1:
        return 0, 0
    return accumulator * outputs * shares * (1 if along else width * vector), 4 * grid


def _block(inputs: int, outputs: int, vector: int, along: bool, unroll: int, layout: Layout) -> tuple[int, int]:
    """Return the width and height of a block of threads (`set_block_dimension`)."""
    first, second = (inputs, outputs) if along else (outputs // vector, inputs)
    if along and layout.strides[0] == 1 and inputs >= 128 and layout.reduced == 1:
        first //= unroll
    most = _MAX_THREADS // vector
    first, second = min(power_below(first), most), min(power_below(second), most)
    height = min(second, most // min(first, _WARP))
    return min(first, most // height), height


def _output_vector(layout: Layout) -> int:
    """Return how many neighbouring outputs one thread takes: 4, 2 or 1 (`get_output_vec_size`)."""
    if layout.strides[layout.reduced] != 1:
        return 1
    numbers = [layout.shape[layout.reduced]]
    numbers += [stride for dim, stride in enumerate(layout.strides) if dim != layout.reduced]
    return next(size for size in (4, 2, 1) if all(number % size == 0 for number in numbers))


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
    cast = tensor.dtype != out.dtype and not (str(tensor.dtype) in _HALF and str(out.dtype) == "torch.float32")
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
    indexed = isinstance(call.out, tuple) or str(call.out.dtype) == "torch.int64" != str(call.first.dtype)
    accumulator = 16 if indexed else accumulator_bytes(call.first.dtype)
    return reduction_workspaces(call.first, _dims(call), accumulator=accumulator)


def _foreach_norm(call: OperatorCall) -> list[MemoryStep]:
    tensors: Sequence[Tensor] = call["self"]
    if not tensors or call["ord"] not in _FAST_NORMS or len({tensor.dtype for tensor in tensors}) > 1:
        return []
    largest = max(tensor.numel() for tensor in tensors)
    return before_outputs([Workspace("foreach_norm", (len(tensors), largest, accumulator_bytes(tensors[0].dtype)))])


def _dims(call: OperatorCall) -> Sequence[int]:
    dim = call["dim"]
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


def _embedding_gradient(call: OperatorCall) -> list[MemoryStep]:
    """Sort the indices, allocate the gradient, then add up each run of equal indices in parts."""
    of_bag = "grad" in call.signature  # Of an `nn.EmbeddingBag`.
    if of_bag and call["mode"] == _BAG_OF_MAXIMA:
        return []
    grad, indices, rows = call["grad" if of_bag else "grad_output"], call["indices"], call["num_weights"]
    copies = [] if of_bag else layout_copies(grad, indices)
    least = 1 if of_bag or call["scale_grad_by_freq"] else _MANY_INDICES
    count, index_bytes = indices.numel(), indices.dtype.itemsize
    sums = Workspace("embedding_sums", (count, rows, grad.shape[-1], accumulator_bytes(grad.dtype), least))
    names = ("indices", "segments", "partials")
    numbers, segment, partials = (Workspace(f"embedding_{name}", (count, rows, index_bytes, least)) for name in names)
    temporary = Workspace("sorted_pairs", (count, 2 * index_bytes, least))
    sorting: list[MemoryStep] = [*copies, numbers, numbers, numbers, temporary, Freed(2), OutputAllocated()]
    return [*sorting, numbers, segment, segment, partials, sums]


def _index_put(call: OperatorCall) -> list[MemoryStep]:
    """Only sums need sorted indices. The number of indices in a mask is not known."""
    indices = [index for index in call["indices"] if index is not None]
    accumulate = call["accumulate"] or call.deterministic
    if not accumulate or any(str(index.dtype) in ("torch.bool", "torch.uint8") for index in indices):
        return []
    shapes = (reversed(index.shape) for index in indices)
    count = prod(map(max, zip_longest(*shapes, fillvalue=1)))
    numbers = Workspace("index_put", (count,))
    copies = layout_copies(call["self"])
    return [*copies, numbers, numbers, Freed(), numbers, numbers, numbers, Workspace("sorted_pairs", (count, 16, 0))]


def _sort(call: OperatorCall) -> list[MemoryStep]:
    """Short rows are sorted in place; a few long ones at once, by value and then by row (cuda/SortStable.cu)."""
    tensor = call.first
    columns = tensor.shape[call["dim"]] if tensor.dim() else 0
    if not columns:
        return []
    count, key_bytes = tensor.numel(), tensor.dtype.itemsize
    rows, pairs = count // columns, Workspace("sorted_pairs", (count, key_bytes + 8, 0))
    if columns <= _SMALL_SORT:
        return [Workspace("sort", (columns, 8))]
    if rows == 1 or columns >= _VERY_LONG_SORT:
        return [Workspace("sort", (columns, 8)), Workspace("sorted_pairs", (columns, key_bytes + 8, 0))]
    indices = Workspace("sort", (count, 8))
    if rows >= _MANY_SORTS:
        return [indices, pairs]
    by_value: list[MemoryStep] = [indices, indices, Workspace("sort", (count, key_bytes)), pairs, Freed(2)]
    return [*by_value, Workspace("sorted_pairs", (count, 0, 0))]


def _unique(call: OperatorCall) -> list[MemoryStep]:
    """Values are sorted, with their places for the inverse; the output keeps room for all (cuda/UniqueCub.cu)."""
    tensor, inverse = call.first, bool(call["return_inverse"])
    count, size = tensor.numel(), tensor.dtype.itemsize
    if str(tensor.dtype) == "torch.bool" or not count:
        return []
    places: list[MemoryStep] = [Workspace("sort", (count, 8))] * (2 * inverse)
    pairs = Workspace("sorted_pairs", (count, size + 8 * inverse, 0))
    room = Kept(Workspace("sort", (count * size - bytes_of(call.out[0]), 1)), 0)
    return [Workspace("sort", (count, size)), *places, pairs, Freed(), room, OutputAllocated()]


def _scan(call: OperatorCall) -> list[Workspace]:
    tensor = call.first
    single = tensor.dim() and tensor.shape[call["dim"]] == tensor.numel()
    return [Workspace("scan", (tensor.numel(),))] if single else []


WORKSPACES: Mapping[str, Handler] = {
    **dict.fromkeys(("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm"), _total),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _moments),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), _extreme),
    "logsumexp": lambda call: [Workspace("difference", (bytes_of(call.first),)), *_total(call)],
    "_foreach_norm": _foreach_norm,
    **dict.fromkeys(
        ("embedding_dense_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward"), _embedding_gradient
    ),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    "sort": _sort,
    "_unique2": _unique,
    **dict.fromkeys(("cumsum", "cumprod"), _scan),
}
