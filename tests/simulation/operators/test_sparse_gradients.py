"""Sparse gradients: the memory of indices and values, with each optimizer that supports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_up_card import most_held
from torch import nn

from autoaccum.simulation.cards import find_card
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.simulation import simulate

ROWS, COLUMNS = 100_000, 64
TABLE = ROWS * COLUMNS * 4
EACH = COLUMNS * 4 + 8
"""Bytes of a row of a gradient, with its index."""

STATES = {"SGD": 0, "Adagrad": 1, "SparseAdam": 2}


def in_use(mode: FakeCudaMode, step: Callable[[], Any]) -> tuple[int, int]:
    """Return the bytes that `step` leaves allocated, and the most it allocates at one time."""
    before, start = mode.recorder.live_bytes, len(mode.recorder.events)
    step()
    return mode.recorder.live_bytes - before, most_held(mode.recorder.events[start:], mode.recorder.sizes)


@pytest.fixture
def table() -> Any:
    with simulate(find_card("rtx3090")) as mode:
        mode.recorder.begin(lambda: "forward")
        yield mode, nn.Embedding(ROWS, COLUMNS, sparse=True).cuda(), torch.zeros(500, dtype=torch.long).cuda()


def test_a_gradient_takes_its_values_and_shares_the_indices_of_the_batch(table: Any) -> None:
    mode, layer, tokens = table
    left, most = in_use(mode, lambda: layer(tokens).square().sum().backward())
    assert left == 500 * COLUMNS * 4, "the indices are those of the batch"
    assert most < 5 * 500 * COLUMNS * 4, "nothing of the size of the table"
    gradient = layer.weight.grad
    assert (gradient.layout, gradient._nnz(), gradient.is_coalesced()) == (torch.sparse_coo, 500, False)
    assert (gradient._indices().shape, gradient._values().shape) == ((1, 500), (500, COLUMNS))


def test_coalescing_takes_three_more_indices_and_the_values(table: Any) -> None:
    mode, layer, tokens = table
    layer(tokens).square().sum().backward()
    kept: list[Any] = []
    left, most = in_use(mode, lambda: kept.append(layer.weight.grad.coalesce()))
    assert left == 500 * EACH
    assert most == 500 * (EACH + 2 * 8)
    assert kept[0].coalesce() is kept[0], "it is by now"
    assert kept[0].indices().shape == (1, 500)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", STATES)
def test_an_update_keeps_states_of_the_table_and_takes_rows_of_it(name: str, table: Any) -> None:
    mode, layer, tokens = table
    optimizer = getattr(torch.optim, name)(layer.parameters())
    for update in range(2):
        layer(tokens).square().sum().backward()
        left, most = in_use(mode, optimizer.step)
        in_first = STATES[name] * TABLE if name == "SparseAdam" and update == 0 else 0
        assert left == in_first
        assert most - left <= 9 * 500 * EACH
        assert (most - left > 500 * EACH) == (name != "SGD")
        optimizer.zero_grad()
    assert mode.recorder.live_bytes == (1 + STATES[name]) * TABLE + tokens.numel() * 8
