"""Workspaces of cuDNN: convolution, batch norm, recurrent networks.

cuDNN is closed and reports its workspaces only on a card, so each is a guess with a band: for a convolution
(ATen/native/cudnn/Conv_v8.cpp) its copies into the other layout, for a batch norm (cudnn/BatchNorm.cpp) sums for each
channel, for a recurrent network (cudnn/RNN.cpp) the gates of one layer. The reserve of a recurrent network is a tensor:
see `CudnnRnnCall.reserve_bytes` in rnn.py. The workspace of cuDNN's attention is in attention_workspace.py.
"""

from __future__ import annotations

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.operators.workspaces import Estimate, Numbers, by_name, ceil_div

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


RULES = by_name(convolution, cudnn_batch_norm, recurrent, recurrent_reserve)
