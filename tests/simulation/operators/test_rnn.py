"""Memory that recurrent networks take and keep on a card (`aten/src/ATen/native/cudnn/RNN.cpp`, `cuda/RNN.cu`)."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_card import make_card, on_card, sizes_of
from torch import Tensor, nn

from autoaccum.simulation.operators.recurrent_workspace import RecurrentCall
from autoaccum.simulation.operators.rnn import MODES, CudnnRnnCall
from autoaccum.simulation.operators.workspace_sizes import estimate
from autoaccum.simulation.trace_records import Workspace

H100 = make_card((9, 0), 132)
BATCH, STEPS, INPUTS, UNITS = 8, 10, 48, 64
ROWS = BATCH * STEPS


def samples(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(BATCH, STEPS, INPUTS, device="cuda:0", dtype=dtype, requires_grad=True)


def form(kind: str = "lstm", **changes: Any) -> CudnnRnnCall:
    made = CudnnRnnCall(MODES.index(kind), 320, 0, 4, batch_first=False, dropout=0.0, train=True, bidirectional=False)
    return made._replace(**changes)


@pytest.mark.parametrize(("kind", "expected"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_the_reserve_is_as_large_as_measured(kind: str, expected: int) -> None:
    """pytorch/pytorch#2895: four layers of 320 units."""
    assert form(kind).reserve_bytes(25_000, 25, 4) == expected + 256


def asked_spaces() -> list[dict[str, Any]]:
    """Some answers of `cudnnGetRNNTempSpaceSizes` of cuDNN 9.19 on an H100, by training networks."""
    with (Path(__file__).parent / "recurrent_spaces.csv").open() as file:
        return [{**row, "mode": MODES.index(row.pop("mode"))} for row in csv.DictReader(file)]


def test_spaces_are_as_cudnn_said() -> None:
    """Reserves to 512 bytes; of the workspaces nearly all within their bands, and most to 3 %."""
    near = 0
    for row in asked_spaces():
        numbers = {name: int(value) for name, value in row.items()}
        call = RecurrentCall(**{name: numbers[name] for name in RecurrentCall._fields})
        sizes = [call.samples] * numbers["steps"] if call.packed else ()
        reserve = form(
            hidden_size=call.hidden,
            proj_size=call.projected,
            num_layers=call.layers,
            mode=call.mode,
            bidirectional=call.directions == 2,
            dropout=0.5 * call.drops,
            batch_sizes=sizes,
        ).reserve_bytes(call.rows, call.samples, call.element_bytes)
        assert abs(reserve - numbers["reserve_bytes"]) <= 512
        workspace = estimate(Workspace("recurrent", call), H100, (2, 11))
        off = abs(workspace.bytes - numbers["workspace_bytes"])
        assert off <= workspace.uncertainty_bytes
        near += off <= 0.03 * workspace.bytes
    assert near > 0.85 * len(asked_spaces())


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (partial(nn.LSTM, 256, 512, 2, batch_first=True), (64, 128, 256), [126_354_176] * 3),
        (partial(nn.LSTM, 64, 150), (128, 64, 64), [114_526_528, 35_960_128, 35_960_128]),
        (partial(nn.GRU, 64, 64), (128, 64, 64), [50_529_024] * 3),
        (partial(nn.RNN, 64, 64), (128, 64, 64), [39_977_728] * 3),
        (partial(nn.LSTM, 256, 512, dtype=torch.float16), (128, 64, 256), [192_414_464] * 3),
    ],
    ids=["lstm", "few units forward", "gru of few units", "rnn of few units", "aligned"],
)
def test_workspaces_are_as_measured(make: Any, shape: tuple[int, ...], expected: list[int]) -> None:
    """Forward, and the gradients of values and of weights, recorded on an H100 with torch 2.11."""
    with on_card((9, 0)) as recorder:
        network = make(device="cuda:0")
        x = torch.empty(shape, device="cuda:0", dtype=network.weight_ih_l0.dtype, requires_grad=True)
        recorder.begin(lambda: "forward")
        torch.autograd.backward(network(x)[0].sum())
        taken = [size for size in recorder.sizes if isinstance(size, Workspace) and size.rule == "recurrent"]
    assert [estimate(workspace, H100, (2, 11)).bytes for workspace in taken] == expected


def test_weights_lie_in_one_buffer_and_dropout_has_a_state() -> None:
    with on_card((9, 0)) as recorder:
        network = nn.LSTM(INPUTS, UNITS, 2, dropout=0.5).cuda()
        assert len({weight.untyped_storage()._cdata for weight in network.parameters()}) == 1
        x = samples()
        recorder.begin(lambda: "forward")
        for _ in range(2):
            network(x)
        states = [size for size in recorder.sizes if isinstance(size, Workspace) and size.rule == "cudnn_dropout"]
    assert [estimate(state, H100, (2, 11)).bytes for state in states] == [6_488_064]


def test_an_lstm_keeps_a_reserve_and_has_all_gradients_in_one_buffer() -> None:
    with on_card() as recorder:
        network, x = nn.LSTM(INPUTS, UNITS, batch_first=True).cuda(), samples()
        held: list[Tensor] = []
        state, out = BATCH * UNITS * 4, ROWS * UNITS * 4
        assert sizes_of(recorder, lambda: held.append(network(x)[0]), above=4) == [
            state,
            state,
            ROWS * INPUTS * 4,  # the steps first
            out,
            state,
            state,
            5 * out + 256,
        ]
        assert held[0].shape == (BATCH, STEPS, UNITS)
        assert held[0].stride() == (UNITS, BATCH * UNITS, 1)
        weights = sum(parameter.numel() for parameter in network.parameters())
        gradient = torch.empty(BATCH, STEPS, UNITS, device="cuda:0")
        sizes = sizes_of(recorder, lambda: torch.autograd.backward(held[0], gradient), above=4)
        # Of steps, states and weights; the last: laid out as the leaf is.
        assert sizes == [ROWS * INPUTS * 4, state, state, weights * 4, ROWS * INPUTS * 4]
        grads = [parameter.grad for parameter in network.parameters()]
        assert len({grad.untyped_storage()._cdata for grad in grads if grad is not None}) == 1
        assert [grad.shape for grad in grads if grad is not None] == [weight.shape for weight in network.parameters()]


def test_cells_run_as_fused_kernels() -> None:
    with on_card() as recorder:
        x = torch.empty(BATCH, INPUTS, device="cuda:0", requires_grad=True)
        unit = BATCH * UNITS * 4
        lstm, gru = nn.LSTMCell(INPUTS, UNITS, device="cuda:0"), nn.GRUCell(INPUTS, UNITS, device="cuda:0")
        zeros, gates = unit, 4 * unit
        held: list[Any] = []
        assert sizes_of(recorder, lambda: held.append(lstm(x)), above=4) == [zeros, gates, gates, unit, unit, gates]
        assert sizes_of(recorder, lambda: held.append(gru(x)), above=4) == [zeros, 3 * unit, 3 * unit, unit, 5 * unit]
        torch.autograd.backward(held[0][0].sum() + held[1].sum())
        assert all(parameter.grad is not None for cell in (lstm, gru) for parameter in cell.parameters())
