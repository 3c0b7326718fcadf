"""Gradients of embeddings, index_put, sort and scans: their workspaces.

Sources: ATen/native/cuda/EmbeddingBackwardKernel.cu (`embedding_backward_cuda_kernel`), cuda/Indexing.cu
(`index_put_with_sort_kernel`), cuda/Sort.cpp (`launch_stable_sort_kernel`) with CUB's DeviceRadixSort,
cuda/ScanUtils.cuh (`scan_dim`) with CUB's DeviceScan. Gradients of `nn.Embedding(sparse=True)` are in
sparse_gradients.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from math import prod

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspaces import (
    Estimate,
    Handler,
    Numbers,
    OperatorCall,
    Tensor,
    accumulator_bytes,
    by_name,
    ceil_div,
    layout_copies,
    product_rule,
    round_up,
)
from autoaccum.simulation.trace_records import Freed, MemoryStep, OutputAllocated, Workspace

_BAG_OF_MAXIMA = 2
_SMALL_SORT = 4096
"""The longest row that one block of threads sorts (ATen/native/cuda/Sort.cu)."""
_MANY_INDICES = 3073
"""The least number of indices that the gradient of an embedding sorts (ATen/native/cuda/Embedding.cu)."""
_ROWS_PER_THREAD = 10
_SCAN_TILE = 15 * 128


def embedding_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The partial sums in fp32. Numbers: indices, rows of the table, columns, bytes of a sum, least indices."""
    indices, rows, columns, sum_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * columns * sum_bytes)


def embedding_indices(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """One number per index: the sorted indices, their positions, or their counts.

    Numbers: indices, rows of the table, bytes of an index, least indices.
    """
    indices, _, index_bytes, least = numbers
    return Estimate(bytes=indices * index_bytes if indices >= least else 0)


def embedding_segments(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The starts of the runs of equal indices, or of their partial sums. Numbers: as of `embedding_indices`."""
    indices, rows, index_bytes, least = numbers
    return Estimate(bytes=min(indices, rows) * index_bytes if indices >= least else 0)


def embedding_partials(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The start of each partial sum. Numbers: as of `embedding_indices`."""
    indices, rows, index_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * index_bytes)


def sorted_pairs(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """A copy of keys and values, and the state of CUB's tiles: about 1,024 bytes for each 4,096 pairs.

    Numbers: pairs, bytes of a pair, least (fewer pairs are sorted in another way).
    """
    pairs, pair_bytes, least = numbers
    if pairs < max(least, _SMALL_SORT):
        return Estimate(bytes=0)
    between = pairs // 4 + 8192
    return Estimate(bytes=pairs * pair_bytes + between, band_bytes=between, measured=False)


def sort(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The range of indices along the sorted dimension; for several long rows keys, indices and row numbers.

    Numbers: rows, columns, bytes of a key.
    """
    rows, columns, key_bytes = numbers
    if rows == 1 or columns <= _SMALL_SORT:
        return Estimate(bytes=8 * columns)
    size = rows * columns * (16 + key_bytes)
    return Estimate(bytes=size, band_bytes=size // 2, measured=False)


def scan(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The state of each tile of a scan over one long row, and of 32 more. Numbers: elements."""
    size = round_up(8 * (ceil_div(numbers[0], _SCAN_TILE) + 32), 256) + 511
    return Estimate(bytes=size, band_bytes=size, measured=False)


def _partials(indices: int, rows: int, least: int) -> int:
    return indices // _ROWS_PER_THREAD + min(indices, rows) if indices >= least else 0


RULES = {
    **by_name(embedding_sums, embedding_indices, embedding_segments, embedding_partials, sorted_pairs, sort, scan),
    "index_put": product_rule(8),  # Indices: linear, sorted, original ones, or their range.
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
