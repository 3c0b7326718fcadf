"""Every generator goes on where its state was captured, after a trip through a file that can run no code."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.accumulation.randomness import Generator
from autoaccum.training.checkpoints.random_states import capture, named_generators, restore

CPU = [torch.device("cpu")]

OWN: dict[str, tuple[Callable[[], Generator], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
    "python": (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
    "legacy": (lambda: np.random.RandomState(3), lambda g: [*g.rand(3), g.randn()]),
    "pcg": (lambda: np.random.Generator(np.random.PCG64(3)), lambda g: [*g.random(3), g.integers(9, dtype=np.int32)]),
    "mt": (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: [*g.random(3)]),
    "philox": (lambda: np.random.Generator(np.random.Philox(3)), lambda g: [*g.random(3)]),
    "sfc": (lambda: np.random.Generator(np.random.SFC64(3)), lambda g: [*g.random(3)]),
}


def through_a_file(states: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def drawn_globally() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.rand(3).tolist()]


def test_global_generators_go_on() -> None:
    drawn_globally()  # Leaves the second of a pair of normal values waiting, in Python's and in NumPy's.
    states = through_a_file(capture(CPU, {}))
    expected = drawn_globally()
    assert restore(states, CPU, {}) == []
    assert drawn_globally() == expected


@pytest.mark.parametrize("kind", OWN)
def test_own_generators_go_on(kind: str) -> None:
    build, draw = OWN[kind]
    generator = build()
    draw(generator)
    states = through_a_file(capture(CPU, {"noise": generator}))
    expected = draw(generator)
    other = build()
    assert restore(states, CPU, {"noise": other}) == []
    assert draw(other) == expected


def test_what_differs_is_said_and_the_rest_is_put_back() -> None:
    states = through_a_file(capture(CPU, {"a": random.Random(1), "b": torch.Generator(), "c": OWN["pcg"][0]()}))
    states["devices"] = [{"device": "cuda:1", "state": torch.zeros(16, dtype=torch.uint8)}]
    states["torch"] = states["torch"][:7]
    expected = random.random()
    told = restore(states, CPU, {"a": random.Random(2), "c": OWN["sfc"][0](), "d": torch.Generator()})
    assert random.random() == expected
    assert told[0].startswith("torch's random state could not be put back (")
    assert told[1] == "random states of 1 card are kept, and it trains on 0 cards"
    assert told[2].startswith("the random state of c could not be put back (")
    assert told[3:] == ["no random state of b is asked for", "no random state of d is kept"]


def test_a_generator_of_another_kind_is_named() -> None:
    states = capture(CPU, {"noise": random.Random(1)})
    (told,) = restore(states, CPU, {"noise": torch.Generator()})
    assert told == "the random state of noise could not be put back (it is one of python, here is one of torch)"


class Own(random.Random):
    def getstate(self) -> Any:
        return "mine"


def test_generators_of_modules_are_found_by_name() -> None:
    layer: Any = nn.Linear(1, 1)
    layer.noise = torch.Generator()
    layer.system, layer.own = random.SystemRandom(), Own()
    criterion: Any = nn.L1Loss()
    criterion.shared, criterion.other = layer.noise, np.random.default_rng(1)
    found = named_generators(nn.DataParallel(nn.Sequential(layer)), {"criterion": criterion})
    assert found == {"0.noise": layer.noise, "criterion.other": criterion.other}
