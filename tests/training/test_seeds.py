from __future__ import annotations

import random

import numpy as np
import torch

from autoaccum.training.seeds import RandomStream, item_seed, kept_randomness, mix, seed_generators


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.standard_normal(), torch.randn(1).item()


def test_seeds_are_the_same_in_every_process() -> None:
    assert mix(0, "order", 1) == 2890303216
    assert item_seed(mix(0, "item", 1), 2, 3) == 1985224005


def test_no_two_items_of_an_epoch_share_a_seed_but_by_chance() -> None:
    base = mix(0, "item", 0)
    seeds = {item_seed(base, place, index) for place in range(200) for index in range(200)}
    assert len(seeds) > 40_000 - 5
    assert max(seeds) < 2**32


def test_a_stream_and_its_caller_take_turns() -> None:
    seed_generators(1)
    alone = [drawn() for _ in range(6)]
    seed_generators(2)
    streamed = [drawn() for _ in range(6)]
    seed_generators(1)
    stream = RandomStream(2)
    for number in range(6):
        assert drawn() == alone[number]
        with stream.running():
            assert drawn() == streamed[number]


def test_a_place_in_a_stream_is_found_again() -> None:
    stream = RandomStream(2)
    with stream.running():
        drawn()
    place = stream.describe(stream.place)
    with stream.running():
        expected = drawn()
    again = RandomStream(5)
    again.restore(place)
    with again.running():
        assert drawn() == expected
    again.restore(None)
    assert again.place is None


def test_generators_are_put_back_after_an_error() -> None:
    seed_generators(1)
    expected = drawn()
    seed_generators(1)
    try:
        with kept_randomness():
            seed_generators(9)
            raise KeyError
    except KeyError:
        assert drawn() == expected
