"""Workspaces of gradients of embeddings, of index_put, sort and scans.

Sources: ATen/native/cuda/EmbeddingBackwardKernel.cu (`embedding_backward_cuda_kernel`), cuda/Indexing.cu
(`index_put_with_sort_kernel`), cuda/Sort.cpp (`launch_stable_sort_kernel`) with CUB's DeviceRadixSort,
cuda/ScanUtils.cuh (`scan_dim`) with CUB's DeviceScan.
"""

from __future__ import annotations

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.operators.workspace_estimate import (
    Estimate,
    Numbers,
    by_name,
    ceil_div,
    product_rule,
    round_up,
)

SMALL_SORT = 4096
"""The longest row that one block of threads sorts (ATen/native/cuda/Sort.cu)."""
_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
_SCAN_TILE = 15 * 128


def index_threshold(*, bag: bool) -> int:
    """Return the least number of indices for which the gradient of an embedding sorts them.

    ATen/native/cuda/Embedding.cu; `bag` is for `nn.EmbeddingBag`.
    """
    return 1 if bag else _FEW_INDICES + 1


def embedding_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the partial sums in fp32. Numbers: indices, rows of the table, columns, bytes of a sum, least indices."""
    indices, rows, columns, sum_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * columns * sum_bytes)


def embedding_indices(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return one number per index: the sorted indices, their positions, or their counts.

    Numbers: indices, rows of the table, bytes of an index, least indices.
    """
    indices, _, index_bytes, least = numbers
    return Estimate(bytes=indices * index_bytes if indices >= least else 0)


def embedding_segments(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the starts of the runs of equal indices, or of their partial sums. Numbers: as of `embedding_indices`."""
    indices, rows, index_bytes, least = numbers
    return Estimate(bytes=min(indices, rows) * index_bytes if indices >= least else 0)


def embedding_partials(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the start of each partial sum. Numbers: as of `embedding_indices`."""
    indices, rows, index_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * index_bytes)


def sorted_pairs(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return a copy of keys and values, and the state of CUB's tiles: about 1,024 bytes for each 4,096 pairs.

    Numbers: pairs, bytes of a pair, least (fewer pairs are sorted in another way).
    """
    pairs, pair_bytes, least = numbers
    if pairs < max(least, SMALL_SORT):
        return Estimate(bytes=0)
    between = pairs // 4 + 8192
    return Estimate(bytes=pairs * pair_bytes + between, band_bytes=between, measured=False)


def sort(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the range of indices along the sorted dimension; for several long rows keys, indices and row numbers.

    Numbers: rows, columns, bytes of a key.
    """
    rows, columns, key_bytes = numbers
    if rows == 1 or columns <= SMALL_SORT:
        return Estimate(bytes=8 * columns)
    size = rows * columns * (16 + key_bytes)
    return Estimate(bytes=size, band_bytes=size // 2, measured=False)


def scan(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the state of each tile of a scan over one long row, and of 32 more. Numbers: elements."""
    size = round_up(8 * (ceil_div(numbers[0], _SCAN_TILE) + 32), 256) + 511
    return Estimate(bytes=size, band_bytes=size, measured=False)


def _partials(indices: int, rows: int, least: int) -> int:
    return indices // _ROWS_PER_THREAD + min(indices, rows) if indices >= least else 0


RULES = {
    **by_name(embedding_sums, embedding_indices, embedding_segments, embedding_partials, sorted_pairs, sort, scan),
    "index_put": product_rule(8),  # Indices: linear, sorted, original ones, or their range.
}
