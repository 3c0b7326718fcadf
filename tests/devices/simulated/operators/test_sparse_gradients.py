"""Sparse gradients: the memory of indices and values, with each optimizer that supports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_up_card import most_held
from torch import nn

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.simulated.tracing.dispatch_mode import FakeCudaMode
from autoaccum.devices.simulated.tracing.simulation import simulate
from autoaccum.devices.trial_record import Inspect

ROWS, COLUMNS = 100_000, 64
TABLE = ROWS * COLUMNS * 4
EACH = COLUMNS * 4 + 8
"""Bytes of a row of a gradient, with its index."""
TOKENS = 16

LINES = f"""
def batch(n):
    return torch.randint(0, {ROWS}, (n, {TOKENS})), torch.randint(0, 4, (n,))

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding({ROWS}, {COLUMNS}, sparse=True), nn.Linear({COLUMNS}, 4, bias=False)

    def forward(self, x):
        return self.head(self.table(x).mean(1))

model = Bag
"""
TWO = """
class Two(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.both = [torch.optim.SparseAdam(params[:1]), torch.optim.SGD(params[1:])]

    def step(self, closure=None):
        for each in self.both:
            each.step()

optimizer = Two
"""
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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", STATES)
def test_a_model_with_sparse_gradients_is_traced(name: str, simulated: Callable[[str], Any]) -> None:
    made = TWO if name == "SparseAdam" else f"optimizer = torch.optim.{name}"
    ask = simulated(LINES + made)
    inspected = ask(Inspect())
    assert not isinstance(inspected, Failure), inspected
    trace = ask(TraceParts(parts=(8, 8)))
    resident = (1 + STATES[name]) * TABLE
    assert resident < most_held(trace.events, trace.sizes) < resident + 12 * 2 * 8 * TOKENS * EACH
