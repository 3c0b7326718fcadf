"""All workspace rules by name: the memory that kernels and libraries take in addition to their tensors.

The rules of cuDNN, and of layer, batch and group norm, are here; others are beside their operators.

cuDNN is closed and reports its workspaces only on a card, so each is a guess with a band: for a convolution
(ATen/native/cudnn/Conv_v8.cpp) its copies into the other layout, for a batch norm (cudnn/BatchNorm.cpp) sums for each
channel, for a recurrent network (cudnn/RNN.cpp) the gates of one layer. The reserve of a recurrent network is a tensor:
see `CudnnRnnCall.reserve_bytes` in rnn.py. The workspace of cuDNN's attention is in attention_workspace.py.

Sources for PyTorch's own normalization kernels, in ATen/native/cuda: layer_norm_kernel.cu
(`LaunchGammaBetaBackwardCUDAKernel`), Normalization.cuh (`flexible_launch_configs`), group_norm_kernel.cu.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators import attention_workspace, indexing, matmul, reductions
from autoaccum.simulation.operators.workspaces import (
    Estimate,
    Numbers,
    Rule,
    by_name,
    ceil_div,
    power_below,
    product_rule,
)
from autoaccum.simulation.trace_records import Workspace

_CONVOLUTION_LEAST_BAND = 32 << 20


def convolution(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of a convolution.

    Tensor cores work on channels-last data, so cuDNN copies contiguous operands of half precision. For TF32 it has
    kernels that read them as they are (NVIDIA in tensorflow/tensorflow#56744). `benchmark=True` tries plans of any
    size. If there is no memory for a plan's workspace, the next plan is taken and kept (`try_plans` in Conv_v8.cpp
    catches the allocator's error).

    Numbers: bytes of the two tensors read, bytes of the tensor written, bytes of an element, channels last,
    TF32 allowed, benchmark (0 or 1).
    """
    read, written, element_bytes, channels_last, tf32, benchmark = numbers
    copies = read + written
    size = copies if element_bytes == 2 and not channels_last else 0
    may_copy = size or (tf32 and not channels_last and card.capability[0] >= 8)
    band = (copies if may_copy else min(copies, _CONVOLUTION_LEAST_BAND)) * (4 if benchmark else 1)
    return Estimate(bytes=size, band_bytes=band, measured=False, optional=True)


def cudnn_batch_norm(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace and reserve of a batch norm: only a band.

    Contiguous data needs a few fp32 numbers for each channel. The persistent kernels for channels-last data share the
    work between the card's multiprocessors, with two sums on each. A reserve of one bit per element belongs to a fused
    activation, which PyTorch does not use (`CUDNN_BATCHNORM_OPS_BN`).

    Numbers: channels, channels last (0 or 1).
    """
    channels, channels_last = numbers
    shares = max(2, card.multiprocessors) if channels_last else 2
    return Estimate(bytes=0, band_bytes=2 * 4 * channels * shares, measured=False)


def recurrent(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The workspace of an RNN. Numbers: steps x samples, hidden size, gates, directions, bytes of an element."""
    rows, hidden, gates, directions, element_bytes = numbers
    size = rows * hidden * gates * directions * element_bytes
    return Estimate(bytes=size, band_bytes=size, measured=False)


def recurrent_reserve(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The band of an RNN's reserve. Numbers: bytes of the reserve, percent of them."""
    reserve_bytes, percent = numbers
    return Estimate(bytes=0, band_bytes=ceil_div(reserve_bytes * percent, 100), measured=False)


def layer_norm_gradient(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Partial sums for the weight (or the bias) of many narrow rows. Numbers: rows, columns, bytes of an element."""
    rows, columns, element_bytes = numbers
    return Estimate(bytes=_partial_rows(rows, columns, card) * columns * element_bytes)


def layer_norm_staging(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The staging area in which those are added up. Numbers: as of `layer_norm_gradient`."""
    return reductions.reduction(_partial_sums(numbers, card), card, torch_version)


def layer_norm_flags(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The counters of that sum. Numbers: as of `layer_norm_gradient`."""
    return reductions.reduction_flags(_partial_sums(numbers, card), card, torch_version)


def batch_norm(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The partial sums of PyTorch's own channels-last kernels.

    Numbers: values per channel, channels, bytes of all sums of one channel.
    """
    values, channels, sums_bytes = numbers
    width = min(power_below(channels), 32)
    height = min(power_below(ceil_div(values, 16)), 512 // width)
    blocks = min(ceil_div(values, height * 16), 128)
    return Estimate(bytes=channels * blocks * sums_bytes if blocks >= 8 else 0)


def _partial_rows(rows: int, columns: int, card: Card) -> int:
    """Return the number of partial sums for each column; 0 if one kernel adds up everything."""
    if rows <= 64 * 1024 or columns // 32 >= card.multiprocessors // 2:
        return 0
    return min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))


def _partial_sums(numbers: Numbers, card: Card) -> Numbers:
    """Return the numbers of the reduction that adds up partial sums over their rows, in fp32 at least."""
    rows, columns, element_bytes = numbers
    layout = reductions.reduction_layout((_partial_rows(rows, columns, card), columns), (columns, 1), (0,))
    accumulator_bytes = max(4, element_bytes)
    return reductions.reduction_numbers(layout, accumulator_bytes=accumulator_bytes, element_bytes=element_bytes)


RULES: Mapping[str, Rule] = {
    "empty_cache": product_rule(),  # No workspace: see `trace_records.EMPTY_CACHE`.
    "layout_copy": product_rule(),  # Operators that call contiguous() or clone() inside, such as Convolution.cpp.
    "loss_elements": product_rule(),  # ATen/native/Loss.cpp: the losses before they are averaged.
    "softmax_product": product_rule(),  # ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: grad * output.
    "ctc_gradient": product_rule(),  # ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template: log_beta.
    "group_norm": product_rule(),  # One number for each sample and channel, or group: count, bytes of one.
    **by_name(convolution, cudnn_batch_norm, recurrent, recurrent_reserve),
    **by_name(layer_norm_gradient, layer_norm_staging, layer_norm_flags, batch_norm),
    **attention_workspace.RULES,
    **matmul.RULES,
    **reductions.RULES,
    **indexing.RULES,
}


def estimate(workspace: Workspace, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Return the size of `workspace` on `card`, under a PyTorch release such as (2, 15)."""
    return RULES[workspace.rule](workspace.numbers, card, torch_version)
