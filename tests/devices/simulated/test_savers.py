"""On a simulated card, each saver takes away the memory that it is about, and costs what it moves and recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from in_process_tracer import InProcessTracer
from made_up_card import held_bytes

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.simulation_requests import CountCost, TraceParts
from autoaccum.devices.trial_requests import PartsRequest
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import UpdateCost
from autoaccum.sources.source import FileSource

WIDTH, BLOCKS, SIZE = 256, 6, 512
WORKLOAD = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = lambda: nn.Sequential(*(Block() for _ in range({BLOCKS})))
batch = lambda size: (torch.randn(size, {WIDTH}), torch.randn(size, {WIDTH}))
criterion = nn.MSELoss()
"""
PARAMETERS = 4 * BLOCKS * 2 * (WIDTH * WIDTH + WIDTH)
"""Their bytes."""
ROW = 4 * WIDTH
"""The bytes of one sample between layers. Of each block, backward needs its input and that of its second layer."""
WIDE = SIZE * ROW
NUMBERS = 8
"""Two losses."""
PRODUCT = 2 * WIDTH * WIDTH
"""The FLOPs of a layer's product for one sample: once forward, and twice backward."""
PARTS = 64, 128

Held = Callable[..., tuple[int, int, int, int]]
Count = Callable[..., UpdateCost]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[PartsRequest[Any]], Any]]:
    path = tmp_path_factory.mktemp("workload") / "blocks.py"
    path.write_text(WORKLOAD)
    tracer = InProcessTracer(TrialSettings(source=FileSource(str(path)), rank_samples=2 * SIZE), find_card("rtx3090"))
    yield tracer.call
    tracer.close()


@pytest.fixture(scope="module")
def held(ask: Callable[..., Any]) -> Held:
    @cache
    def trace(*words: str) -> tuple[int, int, int, int]:
        """Return the bytes at the beginnings of the last backward and of the update, at the peak, and on the host."""
        traced = ask(TraceParts(parts=(SIZE, SIZE), savers=words))
        before = [0, *held_bytes(traced.events, traced.sizes)]
        starts = {phase: at for at, phase in traced.phases if at >= traced.last_update}
        # One on the host allocates nothing on the card; at its end two losses are freed.
        update = starts.get("update", len(traced.events) - 2)
        peak = max(before[traced.last_update :])
        return before[starts["backward"]], before[update], peak, traced.host_bytes or 0

    return trace


@pytest.fixture(scope="module")
def count(ask: Callable[..., Any]) -> Count:
    return cache(lambda *words, parts=PARTS: ask(CountCost(parts=parts, savers=words)))


def test_each_saver_takes_its_share_away_to_the_byte(held: Held) -> None:
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
        with_saver = held(*words)
        assert (backward - with_saver[0], update - with_saver[1]) == (in_backward, in_update), words
        assert with_saver[2] < peak


def test_what_they_take_on_the_host_is_counted_to_the_byte(held: Held) -> None:
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


def test_products_are_counted_forward_and_backward(count: Count) -> None:
    plain = count()
    assert plain.flops.sample == PRODUCT * (2 * BLOCKS * 3 - 1), "the first layer's input needs no gradient"
    assert (plain.flops.part, plain.flops.update) == (0, 0)
    assert plain.moved_bytes.sample == 2 * ROW, "the batch alone: inputs and targets"
    assert plain.host_bytes.of(PARTS) == 0


@pytest.mark.parametrize("blocks", [1, 6])
def test_recomputed_blocks_run_once_more(count: Count, blocks: int) -> None:
    more = count(f"recompute={blocks}").flops.sample - count().flops.sample
    assert more == blocks * PRODUCT, "of two layers, backward needs the output of the first alone"


def test_what_savers_move_is_counted_to_the_byte(count: Count) -> None:
    plain, activations = count(), count("offload-activations")
    # Of each block its input and that of its second layer, and what the loss compares: they go to the host once, and
    # come back once or, where two operators need one, more often.
    saved = (2 * BLOCKS + 2) * ROW
    assert 2 * saved <= activations.moved_bytes.sample - plain.moved_bytes.sample <= 3 * saved
    gradients = count("offload-gradients")
    assert gradients.moved_bytes.part == PARAMETERS, "each micro-batch's gradients go to the host"
    assert gradients.host_bytes.part == pytest.approx(1.5 * PARAMETERS), "the first is written, the second is added"
    assert gradients.moved_bytes.update - plain.moved_bytes.update == PARAMETERS, "and their sum comes back"
    optimizer = count("offload-optimizer")
    # The weights and gradients go to the host, and the weights come back.
    assert optimizer.moved_bytes.update - plain.moved_bytes.update == 3 * PARAMETERS
    assert optimizer.host_bytes.update > 7 * PARAMETERS, "AdamW reads four numbers of each weight and writes three"
    assert optimizer.flops == plain.flops


def test_bytes_and_kernels_beside_products_are_counted(count: Count) -> None:
    """With a third part the sum of gradients, which the first part lacks, is told from what grows with samples."""
    cost = count(parts=(32, 64, 32))
    # Of each block at least relu and its backward, the residual sum and its backward: two to three tensors each.
    assert 8 * BLOCKS * ROW < cost.card_bytes.sample < 40 * BLOCKS * ROW
    assert cost.card_bytes.part >= 3 * PARAMETERS, "each gradient is read, and added to the sum that is"
    assert cost.card_bytes.update > 4 * PARAMETERS, "AdamW reads weights, gradients and two states"
    assert cost.kernels.sample == 0
    assert 10 * BLOCKS < cost.kernels.part < 60 * BLOCKS
    assert cost.flops == count().flops
