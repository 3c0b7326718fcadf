"""On a simulated card, each saver takes away the memory that it is about."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from in_process_tracer import InProcessTracer

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.options import make_options
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource

WORKLOAD = """
import torch
from torch import nn

WIDTH, BLOCKS = 256, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model():
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def batch(size):
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


criterion = nn.MSELoss()
"""

WIDTH, BLOCKS, SIZE = 256, 6, 512
PARAMETERS = 4 * BLOCKS * 2 * (WIDTH * WIDTH + WIDTH)
WIDE = 4 * SIZE * WIDTH
"""The bytes of a tensor between layers. Of each block, backward needs its input and that of its second layer."""
NUMBERS = 8
"""Two losses."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, ...]]:
    path = tmp_path_factory.mktemp("workload") / "blocks.py"
    path.write_text(WORKLOAD)

    @cache
    def trace(*words: str) -> tuple[int, ...]:
        """Return the bytes at the beginnings of the last backward and of the update, at the peak, and on the host."""
        settings = TrialSettings(source=FileSource(str(path)), share=2 * SIZE, options=make_options(savers=words))
        tracer = InProcessTracer(settings, find_card("rtx3090"))
        try:
            traced = tracer.call(TraceParts(parts=(SIZE, SIZE)))
        finally:
            tracer.close()
        peak = 0
        for at in range(traced.last_update, len(traced.events)):
            peak = max(peak, bytes_at(traced, at))
        starts = {phase: at for at, phase in traced.phases if at >= traced.last_update}
        # One on the host allocates nothing on the card; at its end two losses are freed.
        update = starts.get("update", len(traced.events) - 2)
        return bytes_at(traced, starts["backward"]), bytes_at(traced, update), peak, traced.host_bytes or 0

    return trace


def bytes_at(traced: Any, event: int) -> int:
    """Return the bytes of tensors that are held before an event."""
    alive: dict[int, Any] = {}
    for one in traced.events[:event]:
        if one >= 0:
            alive[one] = traced.sizes[one]
        else:
            del alive[~one]
    return sum(size for size in alive.values() if isinstance(size, int))


def test_each_saver_takes_its_share_away_to_the_byte(held: Callable[..., tuple[int, ...]]) -> None:
    """At the beginnings of backward, when all activations are there, and of the update."""
    backward, update, peak, on_host = held()
    assert on_host == 0
    assert update == 4 * PARAMETERS + NUMBERS  # Weights, gradients, and AdamW's two moments.
    saved: dict[tuple[str, ...], tuple[int, int]] = {
        ("recompute",): (BLOCKS * WIDE, 0),
        ("recompute=2",): (2 * WIDE, 0),
        ("offload-activations",): (2 * BLOCKS * WIDE, 0),
        ("offload-gradients",): (PARAMETERS, PARAMETERS),
        ("offload-optimizer",): (2 * PARAMETERS, 3 * PARAMETERS),
        ("offload-gradients", "offload-optimizer"): (3 * PARAMETERS, 3 * PARAMETERS),
    }
    for words, (in_backward, in_update) in saved.items():
        own_backward, own_update, own_peak, _ = held(*words)
        assert (backward - own_backward, update - own_update) == (in_backward, in_update), words
        assert own_peak < peak


def test_what_they_take_on_the_host_is_counted_to_the_byte(held: Callable[..., tuple[int, ...]]) -> None:
    steps = 4 * 4 * BLOCKS  # AdamW counts the updates of each parameter.
    waiting = 2 * (BLOCKS + 1) * WIDE  # The loss needs outputs and targets.
    expected: dict[tuple[str, ...], int] = {
        ("recompute",): 0,
        ("offload-activations",): waiting,
        ("offload-gradients",): PARAMETERS,
        ("offload-optimizer",): 4 * PARAMETERS + steps,  # Weights, two moments, and gradients in the update.
        ("offload-gradients", "offload-optimizer"): 4 * PARAMETERS + steps,
        ("offload-activations", "offload-gradients"): waiting + PARAMETERS,
    }
    assert {words: held(*words)[-1] for words in expected} == expected
