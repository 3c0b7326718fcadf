"""LSTM, GRU and plain RNN as on a card: cuDNN with its reserve, fused cells, packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels import cells, packing
from autoaccum.devices.simulated.kernels.rnn_meta import cudnn_rnn, cudnn_rnn_backward
from autoaccum.devices.simulated.kernels.rnn_network import Network
from autoaccum.devices.simulated.kernels.rnn_reserve import MODES
from autoaccum.devices.simulated.kernels.rnn_steps import run_steps
from autoaccum.devices.simulated.patches import replaced

DROPOUT_STATE_BYTES = (2 << 20) + 512
"""The random state that cuDNN keeps once dropout between layers was used ("slightly over 2MB", `cudnn/RNN.cpp`)."""
_STATE = "cuDNN's dropout"


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Run recurrent networks of fake CUDA tensors as CUDA does (facts 1.4 and 3)."""
    register: Any = library.impl
    for mode, name in enumerate(MODES):
        for key in ("AutogradCUDA", "CUDA"):
            register(f"{name}.input", _padded(mode), key)
            register(f"{name}.data", _packed(mode), key)
    register("_cudnn_rnn", cudnn_rnn, "Meta", allow_override=True)
    register("_cudnn_rnn_backward", cudnn_rnn_backward, "Meta", allow_override=True)
    cells.install(library, card, stack)
    packing.install(library, card, stack)
    # Weights in one buffer take what separate ones take, and it would compare their addresses.
    stack.enter_context(replaced(torch.nn.RNNBase, "flatten_parameters", lambda module: None))


def _padded(mode: int) -> Callable[..., Any]:
    def kernel(input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *form: Any) -> Any:
        return _run(mode, Network(*form), input, [], hx, params)

    return kernel


def _packed(mode: int) -> Callable[..., Any]:
    def kernel(
        data: Tensor, batch_sizes: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *form: Any
    ) -> Any:
        return _run(mode, Network(*form), data, [int(size) for size in batch_sizes.tolist()], hx, params)

    return kernel


def _run(
    mode: int,
    network: Network,
    data: Tensor,
    batch_sizes: list[int],
    hidden: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """`lstm`, `gru` in `aten/src/ATen/native/RNN.cpp` and `_cudnn_impl` in `cudnn/RNN.cpp`."""
    states_in = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    if not (torch._C._get_cudnn_enabled() and data.numel()):
        return run_steps(mode, network, data, batch_sizes, states_in, params)
    hx, cx = states_in[0], states_in[1] if len(states_in) > 1 else None
    hidden_size = hx.size(2) if cx is None else cx.size(2)
    proj_size = hx.size(2) if hx.size(2) != hidden_size else 0
    dropout_state = _dropout_state(network, data)
    with torch.no_grad():  # what cuDNN reads lies step by step, and is given back when it is done
        steps_first = _read(data.transpose(0, 1) if network.batch_first else data)
    out = torch.ops.aten._cudnn_rnn(
        data,
        list(params),
        (4 if network.has_biases else 2) + (proj_size > 0),
        _weight_buffer(params),
        hx,
        cx,
        mode,
        hidden_size,
        proj_size,
        network.num_layers,
        network.batch_first,
        network.dropout,
        network.train,
        network.bidirectional,
        batch_sizes,
        dropout_state,
    )
    del steps_first
    return tuple(out[: 1 + len(states_in)])


def _read(steps: Tensor) -> Tensor:
    """What `_cudnn_rnn` reads instead of `steps`: a copy unless they are contiguous; autocast has made it fp16."""
    if steps.is_contiguous():
        return steps
    halves = torch.is_autocast_enabled("cuda") and steps.dtype != torch.float64
    return torch.empty(steps.shape, dtype=torch.float16 if halves else steps.dtype, device=steps.device)


def _weight_buffer(params: Sequence[Tensor]) -> Tensor:
    """The buffer that weights are copied to for each call when they do not lie in one; empty when they do.

    `RNNBase.flatten_parameters` leaves bf16 alone (`CUDNN_TENSOR_DTYPES` in `torch/backends/cudnn/__init__.py`); under
    autocast a buffer is made in any case, there.
    """
    scattered = params[0].dtype == torch.bfloat16 and not torch.is_autocast_enabled("cuda")
    elements = sum(weight.numel() for weight in params) if scattered else 0
    with torch.no_grad():
        return torch.empty(elements, dtype=params[0].dtype, device=params[0].device)


def _dropout_state(network: Network, data: Tensor) -> Tensor | None:
    """`get_dropout_state`: made once, kept for good, which is to the end of a trace."""
    kept: dict[str, Tensor] = data.fake_mode.kept  # type: ignore[attr-defined]
    if network.train and network.dropout > 0 and _STATE not in kept:
        kept[_STATE] = torch.empty(DROPOUT_STATE_BYTES, dtype=torch.uint8, device=data.device)
    return kept.get(_STATE)
