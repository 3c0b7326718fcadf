"""What `_cudnn_rnn` and its backward return and keep, for tensors without values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoaccum.devices.simulated.kernels.rnn_reserve import CELLS, reserve_bytes


def cudnn_rnn(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_cudnn_rnn` in `aten/src/ATen/native/cudnn/RNN.cpp`; its own meta function has a reserve of 0 bytes."""
    transposed = batch_first and not batch_sizes
    directions = 2 if bidirectional else 1
    outputs = directions * (proj_size or hidden_size)
    leading = tuple(input.shape[:-1])
    if transposed:
        output = input.new_empty((leading[1], leading[0], outputs)).transpose(0, 1)
    else:
        output = input.new_empty((*leading, outputs))
    reserve = reserve_bytes(
        CELLS[mode],
        rows=input.numel() // input.size(-1),
        hidden_size=hidden_size,
        num_layers=num_layers,
        directions=directions,
        element_bytes=input.element_size(),
        dropout=dropout > 0,
        projection=proj_size,
    )
    return (
        output,
        hx.new_empty(hx.shape),
        input.new_empty(0) if cx is None else cx.new_empty(cx.shape),
        input.new_empty(reserve if train else 0, dtype=torch.uint8),
        weight_buf,
    )


def cudnn_rnn_backward(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
    reserve: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
    """`_cudnn_rnn_backward`: the gradients of all weights are views of one buffer."""
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    transposed = batch_first and not batch_sizes
    leading = input.transpose(0, 1) if transposed else input
    grad_input = input.new_empty(leading.shape)
    gradients: list[Tensor | None] = [None] * len(weight)
    if output_mask[3]:
        buffer = weight[0].new_empty(sum(tensor.numel() for tensor in weight))
        pieces = torch.split_with_sizes(buffer, [tensor.numel() for tensor in weight])
        gradients = [piece.view(tensor.shape) for piece, tensor in zip(pieces, weight, strict=True)]
    return (
        (grad_input.transpose(0, 1) if transposed else grad_input) if output_mask[0] else None,
        hx.new_empty(hx.shape) if output_mask[1] else None,
        cx.new_empty(cx.shape) if cx is not None and output_mask[2] else None,
        gradients,
    )
