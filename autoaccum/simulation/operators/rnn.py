"""LSTM, GRU and plain RNN as on a card: cuDNN with its reserve, fused cells, packed sequences.

The size of cuDNN's workspace is in workspace_sizes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cudnn import CUDNN_TENSOR_DTYPES
from torch.nn import functional as F

from autoaccum.simulation.operators.operator_call import Handler, OperatorCall, bytes_of, layout_copies
from autoaccum.simulation.trace_records import Freed, Kept, MemoryStep, OutputAllocated, Workspace
from autoaccum.simulation.unsupported import UnsupportedError

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""In the order of cuDNN's numbers for them (`cudnnRNNMode_t`)."""
_STORED = (1, 1, 5, 6)
"""By mode, the values that a layer stores per hidden unit and step: an LSTM four gates and the cell."""
_FEW_FORWARD, _FEW_BACKWARD = (384, 384, 192, 192), (256, 256, 128, 128)
"""By mode, the most hidden units that kernels for few of them take (`use_rnn_persist_small_h`)."""
_RESERVE = 3
"""The index of the reserve among the outputs of `_cudnn_rnn`."""


class CudnnRnnCall(NamedTuple):
    """Options of a call of cuDNN, in the order of the parameters of `_cudnn_rnn` and its backward."""

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
        """Return the number of directions."""
        return 2 if self.bidirectional else 1

    @property
    def is_transposed(self) -> bool:
        """Return whether cuDNN reads and writes samples and steps in the other order."""
        return self.batch_first and not self.batch_sizes

    def reserve_bytes(self, rows: int, samples: int, element_bytes: int) -> int:
        """Return the bytes of `reserveSpaceSize` (`cudnnGetRNNTempSpaceSizes`, closed source) for steps x samples.

        All layers but the last store their outputs as well; with a projection a layer also stores what it projects, and
        dropout between layers a bit for each output, those of padding included. Within 512 bytes this is the answer of
        cuDNN 9.19 on an H100 for 2,742 networks (tests/simulation/operators/recurrent_spaces.csv has some of them), and
        what a cuDNN on a P100 gave years before (pytorch/pytorch#2895).
        """
        units, projected = self.hidden_size, self.proj_size
        stored = _STORED[self.mode] * units + (units + projected if projected else 0)
        values = rows * self.directions * (stored * self.num_layers + units * (self.num_layers - 1))
        steps = len(self.batch_sizes) * samples or rows
        masked = steps * self.directions**2 * (projected or units) * (self.num_layers - 1) if self.dropout else 0
        return 256 + values * element_bytes + masked // 8


def _cudnn_rnn(
    input: Tensor, weight: Sequence[Tensor], stride: int, weight_buf: Tensor, hx: Tensor, cx: Tensor | None, *form: Any
) -> tuple[Tensor, ...]:
    """Run `_cudnn_rnn` in ATen/native/cudnn/RNN.cpp; PyTorch's meta function for it has a reserve of 0 bytes."""
    call = CudnnRnnCall(*form)
    leading, outputs = tuple(input.shape[:-1]), call.directions * (call.proj_size or call.hidden_size)
    if call.is_transposed:
        output = input.new_empty((leading[1], leading[0], outputs)).transpose(0, 1)
    else:
        output = input.new_empty((*leading, outputs))
    rows, samples = input.numel() // input.size(-1), hx.size(1)
    reserve = call.reserve_bytes(rows, samples, input.element_size()) if call.train else 0
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
    """Run `_cudnn_rnn_backward`: the gradients of all weights are views of one buffer."""
    *_, output_mask = rest
    call = CudnnRnnCall(*rest[4:-2])  # Between the output with the gradients, and the reserve.
    if not call.train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    grad_input = input.new_empty((input.transpose(0, 1) if call.is_transposed else input).shape)
    gradients: list[Tensor | None] = [None] * len(weight)
    if output_mask[3]:
        whole = weight[0].new_empty(sum(tensor.numel() for tensor in weight))
        pieces = torch.split_with_sizes(whole, [tensor.numel() for tensor in weight])
        gradients = [piece.view(tensor.shape) for piece, tensor in zip(pieces, weight, strict=True)]
    return (
        grad_input.transpose(0, 1) if call.is_transposed else grad_input,
        hx.new_empty(hx.shape),
        None if cx is None else cx.new_empty(cx.shape),
        gradients,
    )


def flatten_parameters(module: Any) -> None:
    """Run `RNNBase.flatten_parameters`: weights on the card move to one buffer, and their own memory is freed.

    The original compares addresses, which these have not.
    """
    weights: list[Any] = list(module._flat_weights)
    if not all(isinstance(weight, Tensor) for weight in weights):
        return
    places = {(id(weight.untyped_storage()), weight.storage_offset()) for weight in weights}
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    if len(places) < len(weights) or len(kinds) > 1 or not torch._C._get_cudnn_enabled():
        return
    if weights[0].device.type == "cuda" and weights[0].dtype in CUDNN_TENSOR_DTYPES:
        sizes = [weight.numel() for weight in weights]
        with torch.no_grad():
            pieces = torch.split_with_sizes(weights[0].new_zeros(sum(sizes)), sizes)
            for weight, piece in zip(weights, pieces, strict=True):
                weight.data = piece.view(weight.shape)


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `LSTMCell` in ATen/native/RNN.cpp; `w_hr` projects the output."""
    gates, hidden_gates = F.linear(input, w_ih), F.linear(hx[0], w_hh)
    out, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, hidden_gates, hx[1], b_ih, b_hh)
    return (out if w_hr is None else F.linear(out, w_hr)), cell


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Run `GRUCell` in ATen/native/RNN.cpp."""
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
    """Run `_thnn_fused_gru_cell_cuda` in ATen/native/cuda/RNN.cu: five values of each unit are kept for backward."""
    return torch.empty_like(hx), hx.new_empty((hx.size(0), 5 * hx.size(1)))


def _gru_backward_meta(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    rows, units = workspace.size(0), workspace.size(1) // 5
    input_gates, hidden_gates = (workspace.new_empty((rows, 3 * units)) for _ in range(2))
    biases = [workspace.new_empty(3 * units) for _ in range(2)] if has_bias else [None, None]
    return input_gates, hidden_gates, torch.empty_like(grad_hy), biases[0], biases[1]


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Run `_pack_padded_sequence` in ATen/native/PackedSequence.cpp with the sizes that follow from the lengths."""
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


def _padded(mode: int, input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _run(mode, input, [], *rest)


def _packed(mode: int, data: Tensor, batch_sizes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _run(mode, data, [int(size) for size in batch_sizes.tolist()], *rest)


def _run(
    mode: int,
    data: Tensor,
    batch_sizes: list[int],
    hidden: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """Run `lstm` and `gru` in ATen/native/RNN.cpp and `_cudnn_impl` in cudnn/RNN.cpp."""
    states_in = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    if not (torch._C._get_cudnn_enabled() and data.numel()):
        raise UnsupportedError(
            "a recurrent network runs without cuDNN, step by step", hint="set torch.backends.cudnn.enabled = True"
        )
    hx, cx = states_in[0], states_in[1] if len(states_in) > 1 else None
    hidden_size = hx.size(2) if cx is None else cx.size(2)
    proj_size = hx.size(2) if hx.size(2) != hidden_size else 0
    with torch.no_grad():  # cuDNN reads a copy with the steps first, which is freed afterwards.
        steps_first = _read(data.transpose(0, 1) if batch_first else data)
    weights_per_layer = (4 if has_biases else 2) + (proj_size > 0)
    form = (num_layers, batch_first, dropout, train, bidirectional, batch_sizes)
    call = CudnnRnnCall(mode, hidden_size, proj_size, *form)
    out = torch.ops.aten._cudnn_rnn(data, list(params), weights_per_layer, _weight_buffer(params), hx, cx, *call)
    del steps_first
    return tuple(out[: 1 + len(states_in)])


def _read(steps: Tensor) -> Tensor:
    """Return the tensor that `_cudnn_rnn` reads: a copy unless `steps` is contiguous, in fp16 under autocast."""
    if steps.is_contiguous():
        return steps
    halves = torch.is_autocast_enabled("cuda") and steps.dtype != torch.float64
    return torch.empty(steps.shape, dtype=torch.float16 if halves else steps.dtype, device=steps.device)


def _weight_buffer(params: Sequence[Tensor]) -> Tensor:
    """Return the buffer to which weights are copied for each call; empty if they lie in one buffer already.

    `RNNBase.flatten_parameters` skips bf16 (`CUDNN_TENSOR_DTYPES` in torch/backends/cudnn/__init__.py). Under autocast,
    tracing/autocast.py makes the buffer.
    """
    scattered = params[0].dtype == torch.bfloat16 and not torch.is_autocast_enabled("cuda")
    elements = sum(weight.numel() for weight in params) if scattered else 0
    with torch.no_grad():
        return torch.empty(elements, dtype=params[0].dtype, device=params[0].device)


def _form(call: OperatorCall, few_units: Sequence[int]) -> tuple[CudnnRnnCall, Workspace]:
    """Return the options of a call, and its workspace; the kernel is chosen as by `get_algo` in cudnn/RNN.cpp."""
    form, tensor = CudnnRnnCall(*(call[name] for name in CudnnRnnCall._fields)), call["input"]
    inputs, units, packed = tensor.shape[-1], form.hidden_size, bool(form.batch_sizes)
    persistent = 0
    if not (packed or form.proj_size or tensor.dtype == torch.float64):
        single = form.num_layers == form.directions == 1 and tensor.dtype == torch.float16
        aligned = single and units <= 1024 and units % 128 == inputs % 128 == 0
        persistent = 1 if units <= few_units[form.mode] else 2 * aligned
    sizes = tensor.numel() // max(1, inputs), call["hx"].shape[1], inputs, units, form.proj_size
    flags = form.num_layers, form.directions, form.mode, tensor.dtype.itemsize, form.dropout > 0, packed, persistent
    return form, Workspace("recurrent", (*sizes, *map(int, flags)))


def _forward_steps(call: OperatorCall) -> list[MemoryStep]:
    """The random state that stays from the first dropout on, the outputs, the workspace, the reserve."""
    form, workspace = _form(call, _FEW_FORWARD)
    outputs = OutputAllocated(0), OutputAllocated(1), OutputAllocated(2)
    state = [Kept(Workspace("cudnn_dropout", ()))] if form.train and form.dropout else []
    return [*state, *outputs, workspace, OutputAllocated(_RESERVE)]


def _backward_steps(call: OperatorCall) -> list[MemoryStep]:
    """`_cudnn_rnn_backward_input`, then `_cudnn_rnn_backward_weight`, which lays out the steps once more.

    Gradients that autograd does not give are zeros, and all of inputs and states are allocated.
    """
    form, workspace = _form(call, _FEW_BACKWARD)
    likes = {"grad_output": call["output"], "grad_hy": call["hx"], "grad_cy": call["cx"]}
    zeros = [tensor for name, tensor in likes.items() if call[name] is None and tensor is not None]
    read = [call["input"], *([] if call["grad_output"] is None else [call["grad_output"]])]
    copies = layout_copies(*(each.transpose(0, 1) if form.is_transposed else each for each in read))
    steps: list[MemoryStep] = [Workspace("layout_copy", (bytes_of(tensor),)) for tensor in zeros]
    steps += [*copies, OutputAllocated(0), OutputAllocated(1), OutputAllocated(2), workspace, Freed(len(copies) + 1)]
    if call["output_mask"][3]:
        steps += [
            *layout_copies(read[0].transpose(0, 1) if form.is_transposed else read[0]),
            OutputAllocated(3),
            workspace,
        ]
    return steps


KERNELS: Mapping[str, Callable[..., Any]] = {
    **{f"{name}.input": partial(_padded, mode) for mode, name in enumerate(MODES)},
    **{f"{name}.data": partial(_packed, mode) for mode, name in enumerate(MODES)},
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "_pack_padded_sequence": _pack,
}
CUDNN_METAS: Mapping[str, Callable[..., Any]] = {"_cudnn_rnn": _cudnn_rnn, "_cudnn_rnn_backward": _cudnn_rnn_backward}
CELL_METAS: Mapping[str, Callable[..., Any]] = {
    "_thnn_fused_gru_cell": _gru_meta,
    "_thnn_fused_gru_cell_backward": _gru_backward_meta,
}
WORKSPACES: Mapping[str, Handler] = {"_cudnn_rnn": _forward_steps, "_cudnn_rnn_backward": _backward_steps}
