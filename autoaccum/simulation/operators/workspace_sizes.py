"""All workspace rules by name: how much memory kernels and libraries take in addition to their tensors.

A rule turns the numbers of a `Workspace`, its parameters here, into bytes on a card under a release of PyTorch; or into
an `Estimate` where these are not certain. Which operators take which workspaces is said beside their kernels.

cuDNN is closed. Where it is installed, it tells the workspaces of convolutions (ATen/native/cudnn/Conv_v8.cpp) without
a card; see cudnn.py. All others are guesses with a band: for a convolution its copies into the other layout; for a
batch norm (cudnn/BatchNorm.cpp), a recurrent network (cudnn/RNN.cpp) and attention (cudnn/MHA.cpp) what an H100 was
measured to take. The reserve of a recurrent network is a tensor: see `CudnnRnnCall.reserve_bytes` in rnn.py.

Sources in ATen/native/cuda: layer_norm_kernel.cu (`LaunchGammaBetaBackwardCUDAKernel`), Normalization.cuh
(`flexible_launch_configs`), group_norm_kernel.cu, EmbeddingBackwardKernel.cu (`embedding_backward_cuda_kernel`),
Indexing.cu (`index_put_with_sort_kernel`), Sort.cpp (`launch_stable_sort_kernel`) with CUB's DeviceRadixSort,
ScanUtils.cuh (`scan_dim`) with CUB's DeviceScan. In ATen/native/transformers/cuda: flash_attn/flash_api.cpp (`mha_bwd`,
`set_params_splitkv`), mem_eff_attention/kernel_backward.h (`workspace_size`) and kernel_forward.h
(`kNeedsOutputAccumulatorBuffer`), attention_backward.cu (`delta`, `kKernelComputesDelta`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.cudnn import (
    FORWARD,
    HALVES,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Convolution,
    plan_workspaces,
)
from autoaccum.simulation.operators.operator_call import ceil_div, power_below, round_up
from autoaccum.simulation.operators.recurrent_workspace import RecurrentCall, is_persistent, recurrent_bytes
from autoaccum.simulation.operators.reductions import reduction_layout, reduction_numbers, staging_and_flags
from autoaccum.simulation.releases import Release, holds
from autoaccum.simulation.trace_records import Workspace


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The size of one workspace: memory that a kernel takes in addition to its tensors, as one block.

    Attributes:
        bytes: The bytes that are probably requested from the allocator; 0 if the kernel needs none at this size.
        uncertainty_bytes: How far off `bytes` may be, in either direction: 0 if they follow from a formula in PyTorch's
            source, which was worked out by hand and not compared with a card for most rules.
        optional: True if the kernel, or another one in its place, runs without this workspace where memory is short.
    """

    bytes: int
    uncertainty_bytes: int = 0
    optional: bool = False


class Target(NamedTuple):
    """Where a workspace is taken: the card, and the release of PyTorch."""

    card: Card
    torch_version: Release


Rule = Callable[..., int | Estimate]


def _guess(size: int, uncertainty_bytes: int | None = None) -> Estimate:
    return Estimate(bytes=size, uncertainty_bytes=size if uncertainty_bytes is None else uncertainty_bytes)


def _product_of(_: Target, *numbers: int) -> int:
    return prod(numbers)


# --- matrix products ---------------------------------------------------------------------------------------------

_CUBLAS_SMALL, _CUBLAS_LARGE = 8_519_680, 32 << 20


def product(on: Target, thread: int, configured: int) -> int:
    """The workspace of cuBLAS: on a thread (0 forward, 1 backward), of `configured` bytes unless that is -1."""
    if configured != -1:
        return configured
    major, version = on.card.capability[0], on.torch_version
    rule = {10: "large_blackwell_workspace", 11: "large_thor_workspace", 12: "large_blackwell_workspace"}.get(major)
    large = major == 9 if rule is None else holds(rule, version)
    return _CUBLAS_LARGE if large else _CUBLAS_SMALL


# --- convolutions, norms and recurrent networks ------------------------------------------------------------------

_CONVOLUTION_LEAST_BAND = 32 << 20
_PRODUCT_BYTES = 4 << 20
_TILE_BYTES = 256 * 128 * 4
_BENCHMARK_LIMIT = 10
"""`torch.backends.cudnn.benchmark_limit`: the plans that `benchmark=True` times."""


def convolution(on: Target, *numbers: int) -> Estimate:
    """The workspace of a convolution, or of one of its gradients: the numbers of a `Convolution`, and `benchmark`.

    It is that of the plan that cuDNN prefers, if it is here to be asked; the card may split sums into more parts, of a
    tile for each multiprocessor. `benchmark=True` takes the fastest of several plans, probably the one with the
    smallest workspace, since copies take time (so 18 runs on an H100). If there is no memory for a plan's workspace,
    the next plan is taken and kept (`try_configs` in Conv_v8.cpp catches the allocator's error).
    """
    kind, data_type, channels_last, tf32, deterministic, benchmark, *geometry = numbers
    asked = Convolution(kind, data_type, channels_last, tf32, deterministic, tuple(geometry))
    bytes_of = [{0: 4, 1: 8}.get(data_type, 2) * prod(sizes) for sizes in asked.tensors]
    if asked.is_product:  # In cuBLASLt: nothing is copied, and sums may be split (H100, cuDNN 9.19: up to 8.3 MiB).
        size, band = _PRODUCT_BYTES if kind == WEIGHT_GRADIENT else 0, _PRODUCT_BYTES + (1 << 20)
    elif plans := plan_workspaces(on.card.capability, asked, _BENCHMARK_LIMIT if benchmark else 1):
        size = min(plans) if benchmark else plans[0]
        is_depthwise_sum = kind == WEIGHT_GRADIENT and data_type in HALVES and asked.tensors[0][1] == 1
        if is_depthwise_sum and not benchmark and size > sum(bytes_of):
            size = 0  # Then an H100 took a plan that needs 2 MiB at most, in fp16 and in bf16.
        band = _TILE_BYTES * on.card.multiprocessors + max(abs(other - size) for other in plans)
    else:
        size = _copied_bytes(on.card, asked, bytes_of)
        band = max(size, min(sum(bytes_of), _CONVOLUTION_LEAST_BAND)) * (4 if benchmark else 1)
    return Estimate(bytes=size, uncertainty_bytes=band, optional=True)


def _copied_bytes(card: Card, asked: Convolution, bytes_of: Sequence[int]) -> int:
    """Return the bytes that cuDNN probably copies into another layout, by most answers of 9.24 for 20 shapes.

    Tensor cores work on channels-last data. For TF32, kernels for GeForce and before Hopper copy that, too: in forward
    and for the input's gradient all that they read.
    """
    weight, sizes, output = bytes_of
    if asked.data_type != 0 or not asked.tf32 or card.capability[0] < 8:
        return sum(bytes_of) if asked.data_type in HALVES and not asked.channels_last else 0
    reads_last = card.capability[0] in (9, 10, 11)
    if asked.channels_last and reads_last:
        return 0
    if asked.kind == FORWARD and not reads_last:
        return weight + sizes
    return weight + output if asked.kind == INPUT_GRADIENT and asked.channels_last else sum(bytes_of)


def cudnn_batch_norm(_: Target, elements: int, channels: int, element_bytes: int, backward: int) -> Estimate:
    """The workspace of a batch norm of channels-last data; contiguous data needs none.

    A share of the elements, as 15 shapes took on an H100 with cuDNN 9.19. Within 3 % where it is above 100 KB.
    """
    forward = elements * 129 // (1024 if element_bytes == 4 else 2560) + 1072 + channels // 16
    return _guess(elements // 12 + 1400 if backward else forward)


def recurrent(on: Target, *numbers: int) -> Estimate:
    """The workspace of a recurrent network (recurrent_workspace.py), and its band."""
    call = RecurrentCall(*numbers)
    usual = recurrent_bytes(call)
    if not is_persistent(call, on.card):
        return _guess(usual, usual // (4 if call.packed or call.projected else 8))
    size = recurrent_bytes(call, persistent=True)  # If cuDNN has no such kernel for a size, it takes a usual one.
    return _guess(size, max(size // 8, size - usual + 512))


def _partial_rows(on: Target, rows: int, columns: int) -> int:
    """Return how many partial sums a layer norm has for each weight; 0 if one kernel adds up everything."""
    if rows <= 64 * 1024 or columns // 32 >= on.card.multiprocessors // 2:
        return 0
    return min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))


def _partial_sums(on: Target, rows: int, columns: int, element_bytes: int) -> tuple[int, int]:
    """Return the staging area and the counters of the reduction that adds them up, in fp32 at least."""
    layout = reduction_layout((_partial_rows(on, rows, columns), columns), (columns, 1), (0,))
    numbers = reduction_numbers(layout, accumulator_bytes=max(4, element_bytes), element_bytes=element_bytes)
    return staging_and_flags(numbers, on.card)


def batch_norm(_: Target, values: int, channels: int, sums_bytes: int) -> int:
    """The partial sums of PyTorch's own channels-last kernels: values per channel, bytes of all sums of a channel."""
    width = min(power_below(channels), 32)
    height = min(power_below(ceil_div(values, 16)), 512 // width)
    blocks = min(ceil_div(values, height * 16), 128)
    return channels * blocks * sums_bytes if blocks >= 8 else 0


# --- reductions, sorts and gathers -------------------------------------------------------------------------------

_NORM_CHUNK = 65_536
_SMALL_SORT = 4096
"""The longest row that one block of threads sorts (ATen/native/cuda/Sort.cu)."""
_ROWS_PER_THREAD = 10
_SCAN_TILE = 15 * 128


def _partials(indices: int, rows: int, least: int) -> int:
    return indices // _ROWS_PER_THREAD + min(indices, rows) if indices >= least else 0


def sorted_pairs(_: Target, pairs: int, pair_bytes: int, least: int) -> int | Estimate:
    """A copy of keys and values, and the state of CUB's tiles: about 1,024 bytes for each 4,096 pairs.

    Fewer than `least` pairs are sorted in another way.
    """
    if pairs < max(least, _SMALL_SORT):
        return 0
    between = pairs // 4 + 8192
    return _guess(pairs * pair_bytes + between, between)


# --- attention ---------------------------------------------------------------------------------------------------


def flash_gradient(on: Target, batch: int, heads: int, queries: int, head_size: int, deterministic: int) -> Estimate:
    """The query's gradient in fp32 (`dq_accum`)."""
    rounded = round_up(head_size, 32)
    column_bytes = 4 * batch * heads * round_up(queries, 128)
    copies = max(1, ceil_div(on.card.multiprocessors, max(1, batch * heads))) if deterministic else 1
    band = column_bytes * copies * max(0, 256 - rounded) if head_size > 192 else 0
    return Estimate(bytes=column_bytes * rounded * copies, uncertainty_bytes=band)


def flash_split_sums(on: Target, batch: int, heads: int, queries: int, keys: int, head_size: int) -> int:
    """The logarithms of the row sums of partial outputs, in fp32; 0 if the forward pass is not split."""
    key_block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    blocks = batch * heads * ceil_div(queries, 64)
    splits = _flash_split_count(blocks, 2 * on.card.multiprocessors, ceil_div(keys, key_block))
    return 4 * splits * batch * heads * queries if splits > 1 else 0


def _flash_split_count(blocks: int, slots: int, most: int) -> int:
    """Return the fewest splits that reach 85 % of the best use of the card (`num_splits_heuristic`)."""
    if 10 * blocks >= 8 * slots:
        return 1
    counts = [n for n in range(1, min(128, slots, most) + 1) if n == 1 or ceil_div(most, n) != ceil_div(most, n - 1)]
    waves = {count: blocks * count / slots for count in counts}
    busy = {count: wave / ceil_div(blocks * count, slots) for count, wave in waves.items()}
    best = max(busy.values(), default=0.0)
    return next((count for count in counts if busy[count] >= 0.85 * best), 1)


class EfficientCall(NamedTuple):
    """A backward pass of memory-efficient attention; `dropout` and `deterministic` are 0 or 1."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_size: int
    value_size: int
    element_bytes: int
    dropout: int
    deterministic: int


def efficient_gradient(on: Target, *numbers: int) -> Estimate:
    """The workspace of memory-efficient attention's backward pass, by the tile that fits in shared memory."""
    call = EfficientCall(*numbers)
    size = _efficient_bytes(call, _efficient_tile(call, on.card))
    other = _efficient_bytes(call, _Tile(64, 64, call.element_bytes == 4))
    band = abs(size - other) if max(call.head_size, call.value_size) > 64 else 0
    return Estimate(bytes=size, uncertainty_bytes=band)


def _efficient_sums(on: Target, *numbers: int) -> int:
    """The row sums of the output times its gradient, before they become `delta`.

    The kernel itself sums (`kKernelComputesDelta`) the rows of halves, except for wide heads on Volta.
    """
    call, on_volta = EfficientCall(*numbers), (7, 0) <= on.card.capability < (7, 5)
    kernel_sums = call.element_bytes < 4 and (_efficient_tile(call, on.card).in_registers or not on_volta)
    return 0 if kernel_sums else 4 * call.batch * call.heads * call.queries


def _efficient_product(on: Target, *numbers: int) -> int:
    """The output times its gradient in fp32, if no kernel sums its rows."""
    return _efficient_sums(on, *numbers) * EfficientCall(*numbers).value_size


class _Tile(NamedTuple):
    """The queries and keys of one block of threads, and whether the gradients of keys stay in registers."""

    queries: int
    keys: int
    in_registers: bool


def _efficient_tile(call: EfficientCall, card: Card) -> _Tile:
    """Return the tile of the first kernel in `mem_eff_attention/kernels/cutlassB.h` that supports size and card."""
    head_size = max(call.head_size, call.value_size)
    half, major = call.element_bytes < 4, card.capability[0]
    small = card.capability in ((8, 6), (8, 9)) or major in (11, 12)
    if head_size <= 64:
        return _Tile(64, 64, True)
    if half and major >= 8 and head_size <= 128:
        if head_size <= 96 and not call.dropout and card.capability in ((8, 6), (8, 9)):
            return _Tile(128, 64, True)
        return _Tile(64, 64, False) if small else _Tile(128, 128, True)
    if half:
        return _Tile(128, 64, head_size <= 128)
    return _Tile(64, 64, True) if small or major < 8 else _Tile(128, 64, True)


def _efficient_bytes(call: EfficientCall, tile: _Tile) -> int:
    elements = ceil_div(call.queries, tile.queries) * ceil_div(call.head_size, tile.keys)
    elements *= tile.queries * tile.keys + 4
    if call.element_bytes < 4 and not tile.in_registers:
        parallel = min(ceil_div(call.keys, tile.keys), 200 // max(1, call.batch * call.heads))
        splits = 1 if call.deterministic else max(1, parallel)
        width = round_up(call.head_size, tile.queries) + round_up(call.value_size, tile.queries)
        elements += splits * tile.keys * width
    return 4 * call.batch * call.heads * round_up(elements, 4)


def cudnn_gradient(
    on: Target, batch: int, heads: int, key_heads: int, queries: int, keys: int, head_size: int, element_bytes: int
) -> Estimate:
    """The workspace of cuDNN's attention: the query's gradient in fp32, a sum for each row, grouped heads' gradients.

    It is right to the byte in all rows of tests/gpu/data/h100.json (cuDNN 9.19), and was not measured on other cards.
    """
    size = 256 + 4 * batch * heads * queries * (round_up(head_size, 32) + 1)
    if key_heads != heads:
        size += 2 * batch * heads * keys * head_size * element_bytes
    return _guess(size, None if on.card.capability != (9, 0) else size // 4)


RULES: Mapping[str, Rule] = {
    "product": product,
    "product_with_bias": lambda on, thread, configured: 1 << 20 if configured == -1 else configured,  # Of cuBLASLt.
    "convolution": convolution,
    "recurrent": recurrent,
    # The state of random numbers for each thread of the card (`cudnnDropoutGetStatesSize`), as on an H100.
    "cudnn_dropout": lambda on: 24 * on.card.multiprocessors * on.card.threads_per_multiprocessor,
    # Norms. Of a layer norm the partial sums for the weight (or the bias) of many narrow rows, and their reduction.
    "layer_norm_gradient": lambda on, rows, columns, itemsize: _partial_rows(on, rows, columns) * columns * itemsize,
    "layer_norm_staging": lambda on, *numbers: _partial_sums(on, *numbers)[0],
    "layer_norm_flags": lambda on, *numbers: _partial_sums(on, *numbers)[1],
    "group_norm": _product_of,  # One number for each sample and channel, or group: count, bytes of one.
    "batch_norm": batch_norm,
    "cudnn_batch_norm": cudnn_batch_norm,
    # Reductions (`reduction_numbers`): blocks of threads share their results in a staging area; each column of blocks
    # has a counter.
    "reduction": lambda on, *numbers: staging_and_flags(numbers, on.card)[0],
    "reduction_flags": lambda on, *numbers: staging_and_flags(numbers, on.card)[1],
    # One partial norm for each chunk; `largest` is the number of elements of the largest tensor.
    "foreach_norm": lambda on, tensors, largest, itemsize: tensors * ceil_div(largest, _NORM_CHUNK) * itemsize,
    # The gradient of a table of rows and columns, of which fewer than `least` indices are not sorted: partial sums in
    # fp32; one number per index (sorted, positions, or counts); starts of runs of equal indices, or of their partial
    # sums; the start of each partial sum.
    "embedding_sums": lambda on, indices, rows, columns, itemsize, least: (
        _partials(indices, rows, least) * columns * itemsize
    ),
    "embedding_indices": lambda on, indices, rows, itemsize, least: indices * itemsize if indices >= least else 0,
    "embedding_segments": lambda on, indices, rows, itemsize, least: (
        min(indices, rows) * itemsize if indices >= least else 0
    ),
    "embedding_partials": lambda on, indices, rows, itemsize, least: _partials(indices, rows, least) * itemsize,
    "index_put": lambda on, count: 8 * count,  # Indices: linear, sorted, original ones, or their range.
    "sorted_pairs": sorted_pairs,
    "sort": _product_of,  # Indices along the sorted dimension, or all keys: count, bytes of one.
    # The state of each tile of a scan over one long row, and of 32 more.
    "scan": lambda on, elements: _guess(round_up(8 * (ceil_div(elements, _SCAN_TILE) + 32), 256) + 511),
    # Flash attention: row sums of the softmax's gradient (`softmax_d`); partial outputs of a forward pass that is split
    # over the keys (no dropout), and the logarithms of their row sums; and for every query head, batch, heads, keys,
    # head size, bytes of an element.
    "flash_gradient": flash_gradient,
    "flash_row_sums": lambda on, batch, heads, queries: 4 * batch * heads * round_up(queries, 128),
    "flash_splits": lambda on, *numbers: flash_split_sums(on, *numbers) * round_up(numbers[-1], 32),
    "flash_split_sums": flash_split_sums,
    "flash_grouped": _product_of,
    # Memory-efficient attention. Where no kernel sums rows: half-precision output or gradient in fp32, their product
    # and its sums; and the sums of each row (`delta`): batch, heads, queries.
    "efficient_gradient": efficient_gradient,
    "efficient_cast": lambda on, *n: _efficient_product(on, *n) if EfficientCall(*n).element_bytes < 4 else 0,
    "efficient_product": _efficient_product,
    "efficient_product_sums": _efficient_sums,
    "efficient_row_sums": lambda on, *rows: 4 * prod(rows),
    # The output of half-precision heads above 128 in fp32.
    "efficient_output": lambda on, batch, heads, queries, value_size, itemsize: (
        4 * batch * heads * queries * value_size if itemsize < 4 and value_size > 128 else 0
    ),
    "cudnn_gradient": cudnn_gradient,
    "empty_cache": _product_of,  # No workspace: see `trace_records.EMPTY_CACHE`.
    "layout_copy": _product_of,  # Operators that call contiguous() or clone() inside, such as Convolution.cpp.
    "cast_copy": _product_of,  # ATen/native/ReduceOpsUtils.h, make_reduction: the input in the output's dtype.
    "difference": _product_of,  # ATen/native/ReduceOps.cpp, logsumexp: the input less its maximum.
    "loss_elements": _product_of,  # ATen/native/Loss.cpp: the losses before they are averaged.
    "softmax_product": _product_of,  # ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output.
    "ctc_gradient": _product_of,  # ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta.
}
"""By name, as a `Workspace` refers to them."""


def estimate(workspace: Workspace, card: Card, torch_version: Release) -> Estimate:
    """Return the size of `workspace` on `card`, under a release of PyTorch."""
    answer = RULES[workspace.rule](Target(card, torch_version), *workspace.numbers)
    return answer if isinstance(answer, Estimate) else Estimate(bytes=answer)
