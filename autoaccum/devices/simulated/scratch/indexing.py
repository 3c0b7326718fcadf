"""Gathering and scattering, sorting and scanning."""

from __future__ import annotations

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.scratch.estimates import Estimate, Numbers, ceil_div

_EMBEDDING = "ATen/native/cuda/EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel"
_INDEX_PUT = "ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel"
_SORT = "ATen/native/cuda/Sort.cpp, launch_stable_sort_kernel, and CUB's DeviceRadixSort"
_SCAN = "ATen/native/cuda/ScanUtils.cuh, scan_dim, and CUB's DeviceScan"
_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
_SMALL_SORT = 4096


def embedding_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Partial sums in fp32. Numbers: indices, rows of the table, columns, bytes of a sum, least indices."""
    indices, rows, columns, sum_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * columns * sum_bytes, source=_EMBEDDING)


def embedding_indices(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Sorted indices, and the segments of equal ones. Numbers: indices, rows, bytes of an index, least indices."""
    indices, rows, index_bytes, least = numbers
    partials = _partials(indices, rows, least)
    entries = 3 * indices + 2 * min(indices, rows) + partials if partials else 0
    return Estimate(bytes=entries * index_bytes, source=_EMBEDDING)


def index_put(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Linear, sorted and original indices, their range, and CUB's copies of two of them. Numbers: indices."""
    each = 8 * numbers[0]
    return Estimate(bytes=6 * each, band_bytes=2 * each, source=_INDEX_PUT, measured=False)


def sort(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Keys and indices once more, where a row is too long for one block. Numbers: rows, columns, bytes of a key."""
    rows, columns, key_bytes = numbers
    size = rows * columns * (key_bytes + 8) if columns > _SMALL_SORT else 0
    return Estimate(bytes=size, band_bytes=size, source=_SORT, measured=size == 0)


def scan(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The state of each tile of a scan over one long row. Numbers: elements."""
    size = 16 * ceil_div(numbers[0], 1024)
    return Estimate(bytes=size, band_bytes=size, source=_SCAN, measured=False)


def index_threshold(*, bag: bool) -> int:
    """From how many indices on the gradient of an embedding is sorted (ATen/native/cuda/Embedding.cu)."""
    return 1 if bag else _FEW_INDICES + 1


def _partials(indices: int, rows: int, least: int) -> int:
    return indices // _ROWS_PER_THREAD + min(indices, rows) if indices >= least else 0
