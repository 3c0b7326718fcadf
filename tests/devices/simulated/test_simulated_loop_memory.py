"""What a loop keeps beside its step moves the traced bytes of a simulated card by what it takes, where it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from made_up_card import held_bytes

from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.simulation.trace_records import Trace

WIDTH, CLASSES = 64, 500
PARAMETERS = 4 * (8 * WIDTH + WIDTH + 2 * WIDTH + WIDTH * CLASSES + CLASSES)
BUFFERS = 4 * 2 * WIDTH + 8
NET = f"""
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


def most_by_phase(trace: Trace) -> dict[str, int]:
    """Return the most bytes of tensors that are held in the last run of each phase, and `end`: those at the end."""
    held = held_bytes(trace.events, trace.sizes)
    bounds = [*trace.phases, (len(held), "start")]
    return {name: max(held[start:end]) for (start, name), (end, _) in pairwise(bounds)} | {"end": held[-1]}


def test_an_average_takes_parameters_and_buffers_all_the_time(simulated: Callable[..., Any]) -> None:
    plain, averaging = (simulated(NET + lines)(TraceParts(parts=(32, 32))) for lines in ("", "ema = True\n"))
    before, after = most_by_phase(plain), most_by_phase(averaging)
    for phase in ("forward", "backward", "clip", "end"):
        assert after[phase] - before[phase] == PARAMETERS + BUFFERS
    assert averaging.sizes.count(8) > plain.sizes.count(8), "how many updates are in it goes to the card"
