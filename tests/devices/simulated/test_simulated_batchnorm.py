"""BatchNorm's modes on a card that is not there: traced as they are, with what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.trial_requests import Inspect
from autoaccum.spec import BatchNormMode

CHANNELS = 64
MODEL = f"""
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
    ask = simulated(MODEL, batchnorm=mode)
    seen = ask(Inspect())
    assert not isinstance(seen, Failure), seen
    assert seen.spec.batchnorm == mode
    takes_one = mode in ("frozen", "exact")
    assert seen.least_size == (1 if takes_one else 2)
    reply = ask(TraceParts(parts=(1, 1) if takes_one else (8, 8, 3), needs_whole_batch=mode == "exact"))
    assert not isinstance(reply, Failure), reply
    assert reply.events


def test_a_file_may_say_it_and_freezing_what_has_no_statistics_is_refused(simulated: Callable[..., Any]) -> None:
    lines = MODEL.replace(f"nn.BatchNorm1d({CHANNELS})", f"nn.BatchNorm1d({CHANNELS}, track_running_stats=False)")
    failure = simulated(lines + 'batchnorm = "frozen"\n')(Inspect())
    assert 'batchnorm is "frozen", and norm have no running statistics' in failure.message
