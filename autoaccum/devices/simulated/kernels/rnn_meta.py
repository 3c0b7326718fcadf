"""Outputs of cuDNN's recurrent networks for tensors without values, and what is kept between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Cell: TypeAlias = Literal["lstm", "gru", "rnn"]

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""As cuDNN numbers them (`cudnnRNNMode_t`)."""

CELLS: tuple[Cell, ...] = ("rnn", "rnn", "lstm", "gru")
"""Which of them are alike."""

STORED = {"lstm": 5, "gru": 6, "rnn": 1}
"""Values a layer stores for each hidden unit and step: for `lstm` four gates and the cell. `rnn` is a guess."""

MEASURED_PERCENT = 25
"""By how much of it the reserve may be off in the form that was measured, with an older cuDNN."""

GUESSED_PERCENT = 50
"""Likewise with dropout, a projection or a second direction, which were not."""

PLAIN_PERCENT = 100
"""Likewise of `rnn`, for which nothing was."""


def reserve_bytes(
    cell: Cell,
    *,
    rows: int,
    hidden_size: int,
    num_layers: int,
    directions: int,
    element_bytes: int,
    dropout: bool = False,
    projection: int = 0,
) -> int:
    """The bytes of `reserveSpaceSize` (`cudnnGetRNNTempSpaceSizes`, whose source is closed).

    Derived from two measurements in pytorch/pytorch#2895 (cuDNN on a P100, fp32, 4 layers of 320 units, 25,000 rows):
    736,000,000 bytes for an LSTM and 864,000,000 for a GRU, which are 5 and 6 values per unit, row and layer, and the
    outputs of all layers but the last.

    Args:
        cell: What kind of network.
        rows: Steps times samples; the sum of the batch sizes when packed.
        hidden_size: Units of a direction.
        num_layers: Layers.
        directions: 2 when bidirectional.
        element_bytes: Bytes of a value.
        dropout: Whether outputs between layers are dropped, which stores them once more.
        projection: Size of an LSTM's projection, 0 without one.
    """
    outputs = (projection or hidden_size) * (num_layers - 1) * (2 if dropout else 1)
    projected = projection * num_layers
    return rows * directions * element_bytes * (STORED[cell] * hidden_size * num_layers + outputs + projected)


def band_percent(cell: Cell, *, layers: int, directions: int, dropout: bool, projection: int) -> int:
    """Return how far off `reserve_bytes` may be, either way, in percent of it."""
    if cell == "rnn":
        return PLAIN_PERCENT
    measured = directions == 1 and not projection and not (dropout and layers > 1)
    return MEASURED_PERCENT if measured else GUESSED_PERCENT


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
