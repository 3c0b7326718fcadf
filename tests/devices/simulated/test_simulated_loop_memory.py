"""What a loop keeps beside its step moves the traced bytes of a simulated card by what it takes, where it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.simulation.trace_records import Phase, Trace

SAMPLES, WIDTH, CLASSES = 32, 64, 500
LOGITS = 4 * SAMPLES * CLASSES
COUNT = 8
PARAMETERS = 4 * (8 * WIDTH + WIDTH + 2 * WIDTH + WIDTH * CLASSES + CLASSES)
BUFFERS = 4 * 2 * WIDTH + 8
HEAD = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, {WIDTH}), nn.BatchNorm1d({WIDTH}), nn.Linear({WIDTH}, {CLASSES})
    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))
def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
model = Net
"""

Make = Callable[..., Trace]


@pytest.fixture
def trace(simulated: Callable[..., Any]) -> Make:
    def make(lines: str = "", size: int = SAMPLES, precision: str | None = None) -> Trace:
        reply = simulated(HEAD + lines, precision)(TraceParts(parts=(size, size)))
        assert not isinstance(reply, Failure), reply
        traced: Trace = reply
        return traced

    return make


def held(trace: Trace) -> list[int]:
    """The bytes of tensors that are alive after each event."""
    sizes = [size if isinstance(size, int) else 0 for size in trace.sizes]
    return list(accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in trace.events))


def stretches(trace: Trace, phase: Phase) -> list[list[int]]:
    """The bytes held in each stretch of events in which the step is in `phase`."""
    bounds = [*trace.phases, (len(trace.events), phase)]
    return [held(trace)[start:end] for (start, name), (end, _) in pairwise(bounds) if name == phase]


def last_most(trace: Trace, phase: Phase) -> int:
    return max(stretches(trace, phase)[-1])


def when_made(trace: Trace, forward: int = -1) -> int:
    """The bytes held as soon as a forward has its outputs, which are as large as what the loss makes of them."""
    start, end = [(start, end) for (start, name), (end, _) in pairwise(trace.phases) if name == "forward"][forward]
    made = [index for index in range(start, end) if trace.sizes[max(trace.events[index], 0)] == LOGITS]
    return held(trace)[made[0]]


def test_an_average_takes_parameters_and_buffers_all_the_time(trace: Make) -> None:
    plain, averaging = trace(), trace("ema = True\n")
    for phase in ("forward", "backward", "clip"):
        assert last_most(averaging, phase) - last_most(plain, phase) == PARAMETERS + BUFFERS
    assert held(averaging)[-1] - held(plain)[-1] == PARAMETERS + BUFFERS
    assert averaging.sizes.count(COUNT) > plain.sizes.count(COUNT), "how many updates are in it goes to the card"
