"""The cost of an update besides its arithmetic: segments from the driver, and waits for the card."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator

WIDTH = 512
PARTS = 4


def make_accumulator(place: torch.device) -> tuple[Accumulator, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    return Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8, clip_norm=1.0), optimizer


def make_batch(place: torch.device) -> tuple[Tensor, Tensor]:
    size = 8 * PARTS
    return torch.randn(size, WIDTH, device=place), torch.randn(size, WIDTH, device=place)


def segments_asked(place: torch.device) -> int:
    """Return how many segments the allocator has got from the driver; the CPU's has none."""
    return 0 if place.type == "cpu" else int(torch.cuda.memory_stats(place)["segment.all.allocated"])


@contextmanager
def counted_waits(place: torch.device) -> Iterator[list[str]]:
    """Collect each wait for the card, as PyTorch warns of it (`torch.cuda.set_sync_debug_mode`)."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if place.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            if place.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    waits += [str(entry.message) for entry in caught if "synchronizing CUDA operation" in str(entry.message)]


def test_later_updates_ask_the_driver_for_nothing(place: torch.device) -> None:
    accumulator, optimizer = make_accumulator(place)
    asked: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: asked.append(-segments_asked(place)))
    optimizer.register_step_post_hook(lambda *_: asked.append(segments_asked(place)))
    for _ in range(5):
        assert accumulator.step(make_batch(torch.device("cpu"))).updated
    grown = [sum(asked[index : index + 2]) for index in range(0, len(asked), 2)]
    assert len(grown) == 5
    assert grown[1:] == [0] * 4


def test_an_update_waits_once_when_the_batch_is_there(place: torch.device) -> None:
    accumulator, _ = make_accumulator(place)
    batch = make_batch(place)
    for _ in range(3):
        accumulator.step(batch)
    with counted_waits(place) as waits:
        accumulator.step(batch)
    assert len(waits) <= 1, waits


def test_a_batch_on_the_host_costs_one_wait_for_each_tensor_of_each_part(place: torch.device) -> None:
    accumulator, _ = make_accumulator(place)
    batch = make_batch(torch.device("cpu"))
    for _ in range(3):
        accumulator.step(batch)
    with counted_waits(place) as waits:
        accumulator.step(batch)
    assert len(waits) <= 1 + 2 * PARTS, waits


@pytest.mark.gpu
def test_the_waits_are_counted_at_all() -> None:
    with counted_waits(torch.device("cuda", 0)) as waits:
        torch.ones(1, device="cuda").item()
    assert waits
