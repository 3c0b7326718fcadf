"""Memory that recurrent networks take and keep on a card (`aten/src/ATen/native/cudnn/RNN.cpp`, `cuda/RNN.cu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_up_card import make_card, on_card, sizes_of
from torch import Tensor, nn

from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.operators.rnn import MODES, CudnnRnnCall
from autoaccum.simulation.trace_records import Workspace

CARD = make_card()
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
    assert form(kind).reserve_bytes(25_000, 4) == expected


def test_the_band_of_the_reserve_lives_as_long_as_the_reserve() -> None:
    with on_card() as recorder:
        network, x = nn.LSTM(INPUTS, UNITS, device="cuda:0"), samples()
        recorder.begin(lambda: "forward")
        out = network(x)[0]
        reserve = 5 * ROWS * UNITS * 4
        band = recorder.sizes.index(Workspace("recurrent_reserve", (reserve, 25)))
        tensor = recorder.sizes.index(reserve)
        assert ~band not in recorder.events
        torch.autograd.backward(out.sum())
        assert abs(recorder.events.index(~band) - recorder.events.index(~tensor)) == 1
        trace = recorder.trace([BATCH])
        sized = Replayer(CARD, AllocatorSettings(), (2, 13)).with_sizes(trace)
        assert sized.uncertainty_bytes >= reserve // 4
        assert "recurrent_reserve" in sized.guessed
        assert sized.sizes[band] == 0
        sized.replay()
        network.eval()
        network(x)
        assert sum(isinstance(size, Workspace) and size.rule == "recurrent_reserve" for size in recorder.sizes) == 1


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
            5 * out,
        ]
        assert held[0].shape == (BATCH, STEPS, UNITS)
        assert held[0].stride() == (UNITS, BATCH * UNITS, 1)
        weights = sum(parameter.numel() for parameter in network.parameters())
        gradient = torch.empty(BATCH, STEPS, UNITS, device="cuda:0")
        sizes = sizes_of(recorder, lambda: torch.autograd.backward(held[0], gradient), above=4)
        assert sizes == [ROWS * INPUTS * 4, weights * 4, ROWS * INPUTS * 4]  # the last: laid out as the leaf is
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
