"""Convolutions, normalisations and recurrent layers; gathering and scattering, sorting and scanning.

Sources, in ATen/native: cudnn/Conv_v8.cpp (cuDNN's own figure, taken to be its copies into the other layout);
cuda/layer_norm_kernel.cu (`LaunchGammaBetaBackwardCUDAKernel`); cuda/Normalization.cuh (`flexible_launch_configs`);
cudnn/BatchNorm.cpp (cuDNN's own figures, taken to be sums for each channel); cuda/group_norm_kernel.cu; cudnn/RNN.cpp
(cuDNN's own figures: one layer's gates, and the reserve as in pytorch/pytorch#2895); cuda/EmbeddingBackwardKernel.cu
(`embedding_backward_cuda_kernel`); cuda/Indexing.cu (`index_put_with_sort_kernel`); cuda/Sort.cpp
(`launch_stable_sort_kernel`) and CUB's DeviceRadixSort; cuda/ScanUtils.cuh (`scan_dim`) and CUB's DeviceScan.
"""

from __future__ import annotations

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.scratch.estimates import Estimate, Numbers, ceil_div, power_below, round_up
from autoaccum.devices.simulated.scratch.reductions import (
    reduction,
    reduction_flags,
    reduction_layout,
    reduction_numbers,
)

_CONVOLUTION_LEAST_BAND = 32 << 20


def convolution(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuDNN: a band, since neither its plan nor the plan's size can be read without a card.

    Tensor cores work on channels-last data, so that contiguous operands of half precision are copied inside cuDNN; for
    TF32 it has kernels that read them as they are (NVIDIA in tensorflow/tensorflow#56744). `benchmark=True` tries plans
    of any size. A plan whose workspace cannot be had gives way to the next one, which is kept (`try_plans` in
    Conv_v8.cpp catches the allocator's error).

    Numbers: bytes of the two tensors read, bytes of the tensor written, bytes of an element, channels last,
    TF32 allowed, benchmark (0 or 1).
    """
    read, written, element_bytes, channels_last, tf32, benchmark = numbers
    copies = read + written
    size = copies if element_bytes == 2 and not channels_last else 0
    may_copy = size or (tf32 and not channels_last and card.capability[0] >= 8)
    band = (copies if may_copy else min(copies, _CONVOLUTION_LEAST_BAND)) * (4 if benchmark else 1)
    return Estimate(bytes=size, band_bytes=band, measured=False, optional=True)


def layer_norm_gradient(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Partial sums for the weight (or the bias) of many narrow rows. Numbers: rows, columns, bytes of an element."""
    rows, columns, element_bytes = numbers
    return Estimate(bytes=_partial_rows(rows, columns, card) * columns * element_bytes)


def layer_norm_staging(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The staging area in which those are summed up. Numbers: as above."""
    return reduction(_partial_sums(numbers, card), card, torch_version)


def layer_norm_flags(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The counters of that sum. Numbers: as above."""
    return reduction_flags(_partial_sums(numbers, card), card, torch_version)


def batch_norm(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Partial sums of PyTorch's own channels-last kernels.

    Numbers: values per channel, channels, bytes of all that is summed for one channel.
    """
    values, channels, sums_bytes = numbers
    width = min(power_below(channels), 32)
    height = min(power_below(ceil_div(values, 16)), 512 // width)
    blocks = min(ceil_div(values, height * 16), 128)
    return Estimate(bytes=channels * blocks * sums_bytes if blocks >= 8 else 0)


def cudnn_batch_norm(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuDNN, and its reserve: a band alone.

    Contiguous data needs a few fp32 numbers for each channel. The persistent kernels, which run on channels-last data,
    share them between the card's multiprocessors: two sums on each. A reserve of a bit for each element belongs to a
    fused activation, which PyTorch does not ask for (`CUDNN_BATCHNORM_OPS_BN`).

    Numbers: channels, channels last (0 or 1).
    """
    channels, channels_last = numbers
    shares = max(2, card.multiprocessors) if channels_last else 2
    return Estimate(bytes=0, band_bytes=2 * 4 * channels * shares, measured=False)


def recurrent(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of cuDNN, a band. Numbers: steps x samples, hidden size, gates, directions, bytes of an element."""
    rows, hidden, gates, directions, element_bytes = numbers
    size = rows * hidden * gates * directions * element_bytes
    return Estimate(bytes=size, band_bytes=size, measured=False)


def recurrent_reserve(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The band of the reserve, which is a tensor with a size of its own. Numbers: its bytes, percent of it."""
    reserve_bytes, percent = numbers
    return Estimate(bytes=0, band_bytes=ceil_div(reserve_bytes * percent, 100), measured=False)


def _partial_rows(rows: int, columns: int, card: Card) -> int:
    """Return how many partial sums there are for each column; 0 where one kernel does it all."""
    if rows <= 64 * 1024 or columns // 32 >= card.multiprocessors // 2:
        return 0
    return min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))


def _partial_sums(numbers: Numbers, card: Card) -> Numbers:
    """Return what the rules of reductions take: partial sums are added up over their rows, in fp32 at least."""
    rows, columns, element_bytes = numbers
    layout = reduction_layout((_partial_rows(rows, columns, card), columns), (columns, 1), (0,))
    return reduction_numbers(layout, accumulator_bytes=max(4, element_bytes), element_bytes=element_bytes)


_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
_SMALL_SORT = 4096
_SCAN_TILE = 15 * 128


def embedding_sums(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Partial sums in fp32. Numbers: indices, rows of the table, columns, bytes of a sum, least indices."""
    indices, rows, columns, sum_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * columns * sum_bytes)


def embedding_indices(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Indices sorted, their places, or how often each comes. Numbers: indices, rows, bytes of an index, least."""
    indices, _, index_bytes, least = numbers
    return Estimate(bytes=indices * index_bytes if indices >= least else 0)


def embedding_segments(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return where runs of equal indices begin, or their partial sums do. Numbers: as of `embedding_indices`."""
    indices, rows, index_bytes, least = numbers
    return Estimate(bytes=min(indices, rows) * index_bytes if indices >= least else 0)


def embedding_partials(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return where each partial sum begins. Numbers: as of `embedding_indices`."""
    indices, rows, index_bytes, least = numbers
    return Estimate(bytes=_partials(indices, rows, least) * index_bytes)


def sorted_pairs(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Keys and values once more, and what CUB's tiles tell each other: some 1,024 bytes for each 4,096 pairs.

    Numbers: pairs, bytes of one, least (fewer are not sorted so).
    """
    pairs, pair_bytes, least = numbers
    if pairs < max(least, _SMALL_SORT):
        return Estimate(bytes=0)
    between = pairs // 4 + 8192
    return Estimate(bytes=pairs * pair_bytes + between, band_bytes=between, measured=False)


def sort(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The range of indices that is sorted along; of several long rows keys and indices again, and which row's each is.

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


def index_threshold(*, bag: bool) -> int:
    """Return from how many indices on the gradient of an embedding is sorted (ATen/native/cuda/Embedding.cu)."""
    return 1 if bag else _FEW_INDICES + 1


def _partials(indices: int, rows: int, least: int) -> int:
    return indices // _ROWS_PER_THREAD + min(indices, rows) if indices >= least else 0
