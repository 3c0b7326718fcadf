"""The cost of an update besides its arithmetic: segments from the driver, and waits for the card."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator

WIDTH, PARTS = 512, 4


def make_accumulator(place: torch.device) -> tuple[Accumulator, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    return Accumulator(model, optimizer, nn.MSELoss(), micro_batch=8, clip_norm=1.0), optimizer


def make_batch(place: torch.device | str) -> tuple[Tensor, Tensor]:
    return torch.randn(8 * PARTS, WIDTH, device=place), torch.randn(8 * PARTS, WIDTH, device=place)


def waits_of(work: Callable[[], object]) -> list[str]:
    """Return each wait for the card, as PyTorch warns of it (`torch.cuda.set_sync_debug_mode`); the CPU has none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    return [str(entry.message) for entry in caught if "synchronizing CUDA operation" in str(entry.message)]


def test_later_updates_ask_the_driver_for_nothing(place: torch.device) -> None:
    def segments() -> int:
        return 0 if place.type == "cpu" else int(torch.cuda.memory_stats(place)["segment.all.allocated"])

    accumulator, optimizer = make_accumulator(place)
    asked: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: asked.append(-segments()))
    optimizer.register_step_post_hook(lambda *_: asked.append(segments()))
    for _ in range(5):
        assert accumulator.step(make_batch("cpu")).updated
    grown = [sum(asked[index : index + 2]) for index in range(0, len(asked), 2)]
    assert grown[1:] == [0] * 4


@pytest.mark.parametrize("on_host", [False, True])
def test_an_update_waits_once_and_for_each_tensor_that_it_moves(place: torch.device, on_host: bool) -> None:
    accumulator, _ = make_accumulator(place)
    batch = make_batch("cpu" if on_host else place)
    for _ in range(3):
        accumulator.step(batch)
    waits = waits_of(lambda: accumulator.step(batch))
    assert len(waits) <= 1 + 2 * PARTS * on_host, waits


@pytest.mark.gpu
def test_the_waits_are_counted_at_all() -> None:
    assert waits_of(torch.ones(1, device="cuda").item)
