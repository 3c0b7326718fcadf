"""A file is planned, and the plan's schedule then trains under the plan's budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.api import plan
from autoaccum.devices.meters import card_limit
from autoaccum.errors import UsageError
from autoaccum.units import MIB

WORKLOAD = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

def batch(size):
    return torch.randn(size, 3, SIDE, SIDE), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture
def reference(place: torch.device, write_workload: Callable[[str], str]) -> str:
    return write_workload(f"SIDE = {64 if place.type == 'cpu' else 96}\n{WORKLOAD}")


def test_a_plan_was_proved_and_keeps_to_its_budget(place: torch.device, reference: str) -> None:
    memory = "48MiB" if place.type == "cpu" else "1GiB"
    target = 120 if place.type == "cpu" else 1500
    made = plan(reference, target_batch=target, device=str(place), memory=memory)
    assert (made.kind, sum(made.micro_batches)) == ("measured", target)
    assert made.device["name"] == str(place)
    assert made.iter_size > 1
    assert not made.capped
    assert made.micro_batch <= made.largest_fit < target
    assert made.peak_bytes is not None
    assert made.peak_bytes <= made.limit_bytes
    assert {trial.outcome for trial in made.trials} >= {"ok", "oom"}
    if place.type == "cuda":
        assert len(made.trials) <= 5, "a simulation of the card begins the search where it ends"
        train(made, reference, place)


def train(made: Any, reference: str, place: torch.device) -> None:
    """Two updates by the plan, under its own budget and not by retries."""
    from autoaccum.sources.loading import load_workload

    workload = load_workload(reference)
    model = workload.build_model().to(place)
    torch.cuda.empty_cache()
    refused = torch.cuda.memory_stats(place.index)["num_ooms"]
    accumulator = Accumulator(
        model, workload.build_optimizer(model), workload.objective, micro_batch=made.micro_batch, recover=False
    )
    with card_limit(place.index, made.limit_bytes + 128 * MIB):  # What other tests left in this process.
        for _ in range(2):
            assert accumulator.step(workload.build_batch(made.target_batch)).updated
    assert torch.cuda.memory_stats(place.index)["num_ooms"] == refused


@pytest.mark.gpu
def test_auto_is_the_card(write_workload: Callable[[str], str]) -> None:
    made = plan(write_workload(f"SIDE = 32\n{WORKLOAD}"), target_batch=8, device="auto")
    assert (made.device["name"], made.iter_size) == ("cuda:0", 1)


@pytest.mark.gpu
def test_a_card_that_is_not_there(write_workload: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="there is no cuda:99"):
        plan(write_workload(f"SIDE = 32\n{WORKLOAD}"), target_batch=8, device="cuda:99")


def test_a_live_model_leaves_the_card_to_its_trials_and_comes_back(place: torch.device) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(place)
    optimizer = torch.optim.Adam(model.parameters())

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 512), torch.randint(0, 10, (size,))

    criterion = nn.CrossEntropyLoss()
    Accumulator(model, optimizer, criterion, micro_batch=8).step(batch(8))
    before, pointers = state_digest(model, optimizer), [parameter.data_ptr() for parameter in model.parameters()]
    held: list[int] = []

    def notice(event: Any) -> None:
        held.append(sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()))

    made = plan(model=model, batch=batch, loss=criterion, optimizer=optimizer, target_batch=64, on_event=notice)
    assert made.device["name"] == str(place)
    assert state_digest(model, optimizer) == before
    if place.type == "cuda":
        assert set(held) == {0}, "the card is free while trials run"
        assert any("waited in host memory" in note for note in made.notes)
    else:
        assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    assert Accumulator(model, optimizer, criterion, micro_batch=8).step(batch(8)).updated
