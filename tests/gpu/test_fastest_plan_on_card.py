"""The fastest micro-batch, and the fastest savers with it, are timed on a card as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoaccum.api import plan
from autoaccum.planning.plan_record import Plan

WORKLOAD = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(4)))

def batch(size):
    return torch.randn(size, 64, 64), torch.randn(size, 64, 64)

criterion = nn.MSELoss()
"""


def check(made: Plan) -> None:
    assert made.throughput is not None
    assert made.micro_batch == made.throughput.knee <= made.largest_fit
    assert made.throughput.knee <= made.throughput.fastest
    proof = made.trials[-1]
    assert (proof.parts, proof.fresh, proof.outcome) == (made.schedule.trial_parts, True, "ok")


def test_the_fastest_that_fits_is_planned(place: torch.device, write_workload: Callable[[str], str]) -> None:
    reference = write_workload(WORKLOAD)
    check(plan(reference, target_batch=64, device=str(place), memory="256MiB", prefer="fastest"))


@pytest.mark.gpu
def test_savers_are_timed_on_the_card(write_workload: Callable[[str], str]) -> None:
    reference = write_workload(WORKLOAD)
    made = plan(reference, target_batch=64, device="cuda:0", memory="64MiB", prefer="fastest", savers="auto")
    check(made)
    assert "sets of savers that were timed" in made.notes[0]
