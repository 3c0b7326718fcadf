"""BatchNorm's modes and parts that need each other, on a simulated card: what it holds, and what waits on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
from made_up_card import held_bytes

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.trial_requests import Inspect
from autoaccum.simulation.trace_records import Trace
from autoaccum.spec import BatchNormMode

SIZE, WIDTH, CHANNELS = 4, 32, 64
WAITING = SIZE * CHANNELS * WIDTH * WIDTH * 4
"""The input of a BatchNorm."""
BATCH = SIZE * 3 * WIDTH * WIDTH * 4

NET = f"""
def batch(n):
    return torch.randn(n, 3, {WIDTH}, {WIDTH}), torch.randint(0, 4, (n,))

class Block(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.conv, self.norm = nn.Conv2d({CHANNELS}, {CHANNELS}, 3, padding=1), nn.BatchNorm2d({CHANNELS})
        self.skips = skips
    def forward(self, x):
        return x + self.norm(self.conv(x)) if self.skips else self.norm(self.conv(x))

def net(skips):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({CHANNELS}, 4)
    body = nn.Conv2d(3, {CHANNELS}, 3, padding=1), Block(skips), nn.ReLU(), Block(skips), nn.ReLU()
    return nn.Sequential(*body, *head)
"""
COUPLED = NET.replace("nn.BatchNorm2d", "nn.InstanceNorm2d") + "model = lambda: net(False)\ncoupled = True\n"


def most_in_update(trace: Trace) -> int:
    """Return the most that tensors hold at once in the last update, without workspaces."""
    return max(held_bytes(trace.events, trace.sizes)[trace.last_update :])


def trace(ask: Callable[..., Any], parts: int) -> Trace:
    made = ask(TraceParts(parts=(SIZE,) * parts, needs_whole_batch=True))
    assert not isinstance(made, Failure), made
    assert isinstance(made, Trace)
    return made


def test_exact_batchnorm_holds_one_part(simulated: Callable[..., Any]) -> None:
    """What waits is emptied: inputs of BatchNorms, and of the blocks around them."""
    ask = simulated(NET + "model = lambda: net(False)\n", batchnorm="exact")
    two, four = trace(ask, 2), trace(ask, 4)
    assert four.host_bytes == 2 * (two.host_bytes or 0) > 0
    held = most_in_update(four)
    assert held - most_in_update(two) <= 2.2 * BATCH
    assert held < most_in_update(trace(ask, 1))


def test_a_coupled_loss_keeps_outputs_alone(simulated: Callable[..., Any]) -> None:
    ask = simulated(COUPLED)
    seen = ask(Inspect())
    assert (seen.spec.coupled, seen.workload.whole_batch, seen.accumulation_warnings) == (True, "recompute", ())
    held = [most_in_update(trace(ask, parts)) for parts in (2, 4)]
    assert held[1] - held[0] < 0.1 * WAITING
    assert trace(ask, 4).host_bytes is None


@pytest.mark.parametrize("needs_whole_batch", [False, True])
def test_whole_batch_is_noticed_by_the_inspection(needs_whole_batch: bool, simulated: Callable[..., Any]) -> None:
    value = "autoaccum.whole_batch(x)" if needs_whole_batch else "x"
    lines = f"""
import autoaccum
class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) - {value}.mean(0)[:4]
model = lambda: Net(8, 4)
"""
    seen = simulated(lines)(Inspect())
    assert not isinstance(seen, Failure), seen
    assert seen.workload.whole_batch == ("lockstep" if needs_whole_batch else None)
    assert not seen.spec.coupled


LINEAR = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, {CHANNELS}), nn.Linear({CHANNELS}, 4)
        self.norm = nn.BatchNorm1d({CHANNELS})
    def forward(self, x):
        return self.last(self.norm(self.first(x)))
model = Net
"""


@pytest.mark.parametrize("mode", get_args(BatchNormMode))
def test_each_mode_is_traced(mode: str, simulated: Callable[..., Any]) -> None:
    ask = simulated(LINEAR, batchnorm=mode)
    seen = ask(Inspect())
    assert not isinstance(seen, Failure), seen
    assert seen.spec.batchnorm == mode
    takes_one = mode in ("frozen", "exact")
    assert seen.least_size == (1 if takes_one else 2)
    reply = ask(TraceParts(parts=(1, 1) if takes_one else (8, 8, 3), needs_whole_batch=mode == "exact"))
    assert not isinstance(reply, Failure), reply
    assert reply.events


def test_a_file_may_say_it_and_freezing_what_has_no_statistics_is_refused(simulated: Callable[..., Any]) -> None:
    lines = LINEAR.replace(f"nn.BatchNorm1d({CHANNELS})", f"nn.BatchNorm1d({CHANNELS}, track_running_stats=False)")
    failure = simulated(lines + 'batchnorm = "frozen"\n')(Inspect())
    assert 'batchnorm is "frozen", and norm have no running statistics' in failure.message
