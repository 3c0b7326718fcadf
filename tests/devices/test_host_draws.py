"""Random numbers of the host: those that decide what runs are found, and drawn in all trials."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.devices.host_draws import drawing, find_draw, generator_states

RNG = np.random.default_rng(5)
OWN: Any = [RNG, random.Random(5), np.random.RandomState(5), torch.Generator()]
UNIFORM: dict[str, Callable[[], float]] = {
    "random": random.random,
    "uniform": lambda: random.uniform(0, 1),
    "numpy": np.random.rand,
    "numpy.uniform": lambda: np.random.uniform(0, 1),
    "torch": lambda: torch.rand([]).item(),
    "torch in float64": lambda: torch.rand([], dtype=torch.float64).item(),
    "torch in place": lambda: torch.empty(1).uniform_().item(),
    "Generator": RNG.random,
    "Random": OWN[1].random,
    "RandomState": OWN[2].uniform,
    "torch.Generator": lambda: torch.rand([], generator=OWN[3]).item(),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_numbers_are_near_zero_or_one_as_asked(name: str) -> None:
    for draw, least, most in (("numbers near 0", 0, 1e-4), ("numbers near 1", 1 - 1e-4, 1)):
        with drawing(draw, OWN):
            made = [UNIFORM[name]() for _ in range(300)]
            assert least <= min(made) <= max(made) <= most


@pytest.mark.parametrize("draw", ["numbers near 0", "numbers near 1"])
def test_loops_that_wait_for_other_numbers_end(draw: str) -> None:
    with drawing(draw, OWN):
        assert any(random.random() < 0.5 for _ in range(10_000))
        assert any(random.random() > 0.5 for _ in range(10_000))
        assert any(np.random.rand() > 0.5 for _ in range(10_000))
        assert any(torch.rand(()) > 0.5 for _ in range(10_000))
        assert any(RNG.random() < 0.5 for _ in range(10_000))
        assert any(RNG.random() > 0.5 for _ in range(10_000))
        assert np.isfinite(RNG.normal(size=1000)).all()
        assert sorted(random.sample(range(5), 5)) == list(range(5))
        assert 0 <= random.choice(range(3)) < 3


def test_the_draw_that_holds_most_is_found_and_the_generators_stay() -> None:
    before = generator_states()
    assert find_draw(lambda: 7) is None
    assert find_draw(lambda: int(random.random() * 100)) == "numbers near 1"
    assert find_draw(lambda: -int(np.random.rand() * 100)) == "numbers near 0"
    middle = find_draw(lambda: round(100 * (0.25 - (torch.rand([]).item() - 0.5) ** 2)))
    assert str(middle).startswith("those of seed ")
    assert find_draw(lambda: [1, 2][3]) is None
    assert generator_states() == before
    random.random()
    assert generator_states() != before


@pytest.mark.parametrize("draw", ["numbers near 0", "those of seed 2"])
def test_generators_of_the_workload_are_restored(draw: str) -> None:
    before, bits = generator_states(OWN), RNG.bit_generator
    with drawing(draw, OWN):
        drawn = [RNG.random(), OWN[1].random(), OWN[2].rand(), torch.rand([], generator=OWN[3]).item()]
        assert generator_states(OWN) != before
    with drawing(draw, OWN):
        again = [RNG.random(), OWN[1].random(), OWN[2].rand(), torch.rand([], generator=OWN[3]).item()]
    assert drawn == again
    assert generator_states(OWN) == before
    assert RNG.bit_generator is bits
    assert find_draw(lambda: int(RNG.random() * 100), OWN) == "numbers near 1"
    RNG.random()
    assert generator_states(OWN) != before
