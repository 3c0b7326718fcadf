"""Recurrent networks without cuDNN: step by step, as CUDA runs them when it is switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.kernels.cells import gru_cell, lstm_cell
from autoaccum.devices.simulated.kernels.rnn_network import Network
from autoaccum.devices.simulated.kernels.rnn_reserve import MODES

State: TypeAlias = tuple[Tensor, ...]
Cell: TypeAlias = Callable[[Tensor, State, Sequence[Tensor]], State]


def run_steps(
    mode: int,
    network: Network,
    data: Tensor,
    batch_sizes: Sequence[int],
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
) -> State:
    """`_rnn_impl` with the layers of `aten/src/ATen/native/RNN.cpp`.

    Raises:
        RuntimeError: The sequences are packed, which only cuDNN is simulated for.
    """
    if batch_sizes:
        raise RuntimeError("packed sequences are simulated with cuDNN only: set torch.backends.cudnn.enabled = True")
    cell, directions = _CELLS[MODES[mode]], network.directions
    projected = len(hidden) == 2 and hidden[0].size(2) != hidden[1].size(2)
    per_layer = (4 if network.has_biases else 2) + projected
    layer_input = data.transpose(0, 1) if network.batch_first else data
    final: list[State] = []
    for layer in range(network.num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * per_layer : (index + 1) * per_layer]
            state = tuple(tensor[index] for tensor in hidden)
            output, state = _layer(cell, layer_input, state, weights, backwards=direction == 1)
            outputs.append(output)
            final.append(state)
        layer_input = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        if network.dropout and network.train and layer < network.num_layers - 1:
            layer_input = F.dropout(layer_input, network.dropout)
    output = layer_input.transpose(0, 1) if network.batch_first else layer_input
    return (output, *(torch.stack(states) for states in zip(*final, strict=True)))


def _layer(
    cell: Cell, data: Tensor, state: State, weights: Sequence[Tensor], *, backwards: bool
) -> tuple[Tensor, State]:
    steps = list(data.unbind(0))
    outputs: list[Tensor] = []
    for step in reversed(steps) if backwards else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _lstm(data: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    w_ih, w_hh, *rest = weights
    biases = rest[:2] if len(rest) >= 2 else [None, None]
    return lstm_cell(data, state, w_ih, w_hh, biases[0], biases[1], rest[-1] if len(rest) % 2 else None)


def _gru(data: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return (gru_cell(data, state[0], *weights),)


def _simple(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(data: Tensor, state: State, weights: Sequence[Tensor]) -> State:
        w_ih, w_hh, *biases = weights
        b_ih, b_hh = biases or (None, None)
        return (activation(F.linear(data, w_ih, b_ih).add_(F.linear(state[0], w_hh, b_hh))),)

    return cell


_CELLS: dict[str, Cell] = {"rnn_relu": _simple(torch.relu), "rnn_tanh": _simple(torch.tanh), "lstm": _lstm, "gru": _gru}
