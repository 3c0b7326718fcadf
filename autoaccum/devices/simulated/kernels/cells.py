"""`LSTMCell` and `GRUCell` as on a card: one fused kernel with a workspace that backward reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.catalog import Card


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Replace the cells, which elsewhere are made of elementwise operators."""
    register: Any = library.impl
    for key in ("AutogradCUDA", "CUDA"):
        register("lstm_cell", lstm_cell, key)
        register("gru_cell", gru_cell, key)
    for name, kernel in (("_thnn_fused_gru_cell", _gru_meta), ("_thnn_fused_gru_cell_backward", _gru_backward_meta)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            register(name, kernel, "Meta")


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`LSTMCell` in `aten/src/ATen/native/RNN.cpp`; `w_hr` projects the output."""
    gates, hidden_gates = F.linear(input, w_ih), F.linear(hx[0], w_hh)
    out, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, hidden_gates, hx[1], b_ih, b_hh)
    return (out if w_hr is None else F.linear(out, w_hr)), cell


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """`GRUCell` in `aten/src/ATen/native/RNN.cpp`."""
    gates, hidden_gates = F.linear(input, w_ih), F.linear(hx, w_hh)
    out: Tensor = torch.ops.aten._thnn_fused_gru_cell(gates, hidden_gates, hx, b_ih, b_hh)[0]
    return out


def _gru_meta(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`_thnn_fused_gru_cell_cuda` in `aten/src/ATen/native/cuda/RNN.cu`: five values of each unit for backward."""
    return torch.empty_like(hx), hx.new_empty((hx.size(0), 5 * hx.size(1)))


def _gru_backward_meta(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    rows, units = workspace.size(0), workspace.size(1) // 5
    input_gates, hidden_gates = (workspace.new_empty((rows, 3 * units)) for _ in range(2))
    biases = [workspace.new_empty(3 * units) for _ in range(2)] if has_bias else [None, None]
    return input_gates, hidden_gates, torch.empty_like(grad_hy), biases[0], biases[1]
