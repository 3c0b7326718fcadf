"""What an update costs is counted by the Accumulator that trains, with each saver."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from in_process_tracer import InProcessTracer

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.simulation_requests import CountCost
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import UpdateCost
from autoaccum.sources.source import FileSource

WORKLOAD = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model():
    return nn.Sequential(*(Block() for _ in range(6)))


def batch(size):
    return torch.randn(size, 256), torch.randn(size, 256)


criterion = nn.MSELoss()
"""

WIDTH, BLOCKS = 256, 6
PARTS = 64, 128
PRODUCT = 2 * WIDTH * WIDTH
"""The FLOPs of a layer's product for one sample: once forward, and twice backward."""
PARAMETERS = BLOCKS * 2 * (WIDTH * WIDTH + WIDTH)
WIDE = 4 * WIDTH
"""The bytes of one sample between layers."""

Count = Callable[..., UpdateCost]


@pytest.fixture(scope="module")
def count(tmp_path_factory: pytest.TempPathFactory) -> Count:
    path = tmp_path_factory.mktemp("workload") / "blocks.py"
    path.write_text(WORKLOAD)

    @cache
    def cost(*words: str, parts: tuple[int, ...] = PARTS) -> UpdateCost:
        tracer = InProcessTracer(TrialSettings(source=FileSource(str(path)), share=256), find_card("rtx3090"))
        try:
            return tracer.call(CountCost(parts=parts, savers=words))
        finally:
            tracer.close()

    return cost


def test_products_are_counted_forward_and_backward(count: Count) -> None:
    plain = count()
    assert plain.flops.sample == PRODUCT * (2 * BLOCKS * 3 - 1), "the first layer's input needs no gradient"
    assert (plain.flops.part, plain.flops.update) == (0, 0)
    assert plain.moved_bytes.sample == 2 * WIDE, "the batch alone: inputs and targets"
    assert plain.host_bytes.of(PARTS) == 0


@pytest.mark.parametrize("blocks", [1, 6])
def test_recomputed_blocks_run_once_more(count: Count, blocks: int) -> None:
    more = count(f"recompute={blocks}").flops.sample - count().flops.sample
    assert more == blocks * PRODUCT, "of two layers, backward needs the output of the first alone"


def test_what_savers_move_is_counted_to_the_byte(count: Count) -> None:
    plain, activations = count(), count("offload-activations")
    # Of each block its input and that of its second layer, and what the loss compares: they go to the host once, and
    # come back once or, where two operators need one, more often.
    saved = (2 * BLOCKS + 2) * WIDE
    assert 2 * saved <= activations.moved_bytes.sample - plain.moved_bytes.sample <= 3 * saved
    gradients = count("offload-gradients")
    assert gradients.moved_bytes.part == 4 * PARAMETERS, "each micro-batch's gradients go to the host"
    assert gradients.host_bytes.part == pytest.approx(1.5 * 4 * PARAMETERS), "the first is written, the second is added"
    assert gradients.moved_bytes.update - plain.moved_bytes.update == 4 * PARAMETERS, "and their sum comes back"
    optimizer = count("offload-optimizer")
    # The weights and gradients go to the host, and the weights come back.
    assert optimizer.moved_bytes.update - plain.moved_bytes.update == 3 * 4 * PARAMETERS
    assert optimizer.host_bytes.update > 7 * 4 * PARAMETERS, "AdamW reads four numbers of each weight and writes three"
    assert optimizer.flops == plain.flops


def test_bytes_and_kernels_beside_products_are_counted(count: Count) -> None:
    """With a third part the sum of gradients, which the first part lacks, is told from what grows with samples."""
    cost = count(parts=(32, 64, 32))
    # Of each block at least relu and its backward, the residual sum and its backward: two to three tensors each.
    assert 8 * BLOCKS * WIDE < cost.card_bytes.sample < 40 * BLOCKS * WIDE
    assert cost.card_bytes.part >= 3 * 4 * PARAMETERS, "each gradient is read, and added to the sum that is"
    assert cost.card_bytes.update > 4 * 4 * PARAMETERS, "AdamW reads weights, gradients and two states"
    assert cost.kernels.sample == 0
    assert 10 * BLOCKS < cost.kernels.part < 60 * BLOCKS
    assert cost.flops == count().flops
