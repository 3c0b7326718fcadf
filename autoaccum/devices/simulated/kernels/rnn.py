"""LSTM, GRU and plain RNN as on a card: cuDNN with its reserve, fused cells, packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.patches import patched
from autoaccum.devices.simulated.unsupported import UnsupportedError

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""As cuDNN numbers them (`cudnnRNNMode_t`)."""
_STORED = (1, 1, 5, 6)
"""By mode, values a layer stores for each hidden unit and step: of an LSTM four gates and the cell. 1 is a guess."""
_MEASURED_PERCENT, _GUESSED_PERCENT, _PLAIN_PERCENT = 25, 50, 100
"""By how much of it the reserve may be off: in the form that was measured, with an older cuDNN; with dropout, a
projection or a second direction, which were not; and of a plain RNN, for which nothing was."""


class Network(NamedTuple):
    """A recurrent network, in the order of the parameters of `lstm` and its kin."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


class Form(NamedTuple):
    """A call of cuDNN, in the order of the parameters of `_cudnn_rnn` and its backward."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: Sequence[int] = ()
    dropout_state: Tensor | None = None

    @property
    def directions(self) -> int:
        """How many there are."""
        return 2 if self.bidirectional else 1

    @property
    def is_transposed(self) -> bool:
        """Return whether cuDNN reads and writes samples and steps the other way round."""
        return self.batch_first and not self.batch_sizes

    def reserve_bytes(self, rows: int, element_bytes: int) -> int:
        """The bytes of `reserveSpaceSize` (`cudnnGetRNNTempSpaceSizes`, whose source is closed) for steps x samples.

        Derived from two measurements in pytorch/pytorch#2895 (cuDNN on a P100, fp32, 4 layers of 320 units, 25,000
        rows): 736,000,000 bytes for an LSTM and 864,000,000 for a GRU, which are 5 and 6 values per unit, row and
        layer, and the outputs of all layers but the last. Dropout between layers stores those once more.
        """
        outputs = (self.proj_size or self.hidden_size) * (self.num_layers - 1) * (2 if self.dropout else 1)
        stored = (_STORED[self.mode] * self.hidden_size + self.proj_size) * self.num_layers
        return rows * self.directions * element_bytes * (stored + outputs)

    def band_percent(self) -> int:
        """Return how far off `reserve_bytes` may be, either way, in percent of it."""
        if _STORED[self.mode] == 1:
            return _PLAIN_PERCENT
        measured = not (self.bidirectional or self.proj_size or (self.dropout and self.num_layers > 1))
        return _MEASURED_PERCENT if measured else _GUESSED_PERCENT


def _cudnn_rnn(
    input: Tensor, weight: Sequence[Tensor], stride: int, weight_buf: Tensor, hx: Tensor, cx: Tensor | None, *form: Any
) -> tuple[Tensor, ...]:
    """`_cudnn_rnn` in `aten/src/ATen/native/cudnn/RNN.cpp`; its own meta function has a reserve of 0 bytes."""
    asked = Form(*form)
    leading, outputs = tuple(input.shape[:-1]), asked.directions * (asked.proj_size or asked.hidden_size)
    if asked.is_transposed:
        output = input.new_empty((leading[1], leading[0], outputs)).transpose(0, 1)
    else:
        output = input.new_empty((*leading, outputs))
    reserve = asked.reserve_bytes(input.numel() // input.size(-1), input.element_size()) if asked.train else 0
    return (
        output,
        hx.new_empty(hx.shape),
        input.new_empty(0) if cx is None else cx.new_empty(cx.shape),
        input.new_empty(reserve, dtype=torch.uint8),
        weight_buf,
    )


def _cudnn_rnn_backward(
    input: Tensor, weight: Sequence[Tensor], stride: int, buffer: Tensor, hx: Tensor, cx: Tensor | None, *rest: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
    """`_cudnn_rnn_backward`: the gradients of all weights are views of one buffer."""
    *_, output_mask = rest
    asked = Form(*rest[4:-2])  # Between the output with the gradients, and the reserve.
    if not asked.train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    grad_input = input.new_empty((input.transpose(0, 1) if asked.is_transposed else input).shape)
    gradients: list[Tensor | None] = [None] * len(weight)
    if output_mask[3]:
        whole = weight[0].new_empty(sum(tensor.numel() for tensor in weight))
        pieces = torch.split_with_sizes(whole, [tensor.numel() for tensor in weight])
        gradients = [piece.view(tensor.shape) for piece, tensor in zip(pieces, weight, strict=True)]
    return (
        (grad_input.transpose(0, 1) if asked.is_transposed else grad_input) if output_mask[0] else None,
        hx.new_empty(hx.shape) if output_mask[1] else None,
        cx.new_empty(cx.shape) if cx is not None and output_mask[2] else None,
        gradients,
    )


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


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`_pack_padded_sequence` in `ATen/native/PackedSequence.cpp`; FakeTensorMode cannot tell its sizes."""
    counts = [int(length) for length in lengths.tolist()]
    padded = input.transpose(0, 1) if batch_first else input
    batch_sizes = [sum(length > step for length in counts) for step in range(max(counts))]
    data: Tensor = _Pack.apply(padded, batch_sizes)  # type: ignore[no-untyped-call]
    return data, torch.tensor(batch_sizes)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, batch_sizes: list[int]) -> Tensor:
        ctx.shape = padded.shape
        rows = [padded[step, :size] for step, size in enumerate(batch_sizes)]
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(ctx.shape), None


DROPOUT_STATE_BYTES = (2 << 20) + 512
"""The random state that cuDNN keeps once dropout between layers was used ("slightly over 2MB", `cudnn/RNN.cpp`)."""
_STATE = "cuDNN's dropout"


def install(library: torch.library.Library, card: Card, stack: ExitStack) -> None:
    """Run recurrent networks of fake CUDA tensors as CUDA does."""
    register: Any = library.impl
    for mode, name in enumerate(MODES):
        for key in ("AutogradCUDA", "CUDA"):
            register(f"{name}.input", _padded(mode), key)
            register(f"{name}.data", _packed(mode), key)
    register("_cudnn_rnn", _cudnn_rnn, "Meta", allow_override=True)
    register("_cudnn_rnn_backward", _cudnn_rnn_backward, "Meta", allow_override=True)
    for key in ("AutogradCUDA", "CUDA"):
        register("lstm_cell", lstm_cell, key)
        register("gru_cell", gru_cell, key)
        register("_pack_padded_sequence", _pack, key)
    for name, kernel in (("_thnn_fused_gru_cell", _gru_meta), ("_thnn_fused_gru_cell_backward", _gru_backward_meta)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            register(name, kernel, "Meta")
    # Weights in one buffer take what separate ones take, and it would compare their addresses.
    stack.enter_context(patched(torch.nn.RNNBase, "flatten_parameters", lambda module: None))


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
        raise UnsupportedError(
            "a recurrent network runs without cuDNN, step by step", hint="set torch.backends.cudnn.enabled = True"
        )
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
    """The tensor `_cudnn_rnn` reads instead of `steps`: a copy unless they are contiguous; under autocast fp16."""
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
    kept: dict[str, Tensor] = data.fake_mode.library_tensors  # type: ignore[attr-defined]
    if network.train and network.dropout > 0 and _STATE not in kept:
        kept[_STATE] = torch.empty(DROPOUT_STATE_BYTES, dtype=torch.uint8, device=data.device)
    return kept.get(_STATE)
