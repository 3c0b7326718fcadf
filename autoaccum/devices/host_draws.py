"""Random numbers that a step draws on the host, where they may decide what runs: stochastic depth, for example."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import torch

from autoaccum.accumulation.rng_state import preserve_rng_state, seed_generators

_WORDS: Final = {"numbers near 1": 0x12DD9BB3, "numbers near 0": 0x953CF161}
"""Words of a Mersenne Twister's state that come out as 0xFFFFFFFF and 0x7F: 624 of these are drawn before others."""
_DRAWS = (*_WORDS, "those of seed 1", "those of seed 2", "those of seed 3")


def generator_states() -> bytes:
    """Return the states of the host's generators, to be compared."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()))


def use_draw(draw: str | None) -> None:
    """Set the host's generators to draw numbers that `find_draw` has returned; None: leave them as they are."""
    if draw in _WORDS:
        words = [_WORDS[draw]] * 624
        random.setstate((3, (*words, 0), None))
        np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))
        state = torch.get_rng_state().numpy().copy()  # Seed, words left, whether seeded, next word, and the words.
        state[:5016].view(np.uint64)[1:] = [624 | 1 << 32, 0, *words]
        torch.set_rng_state(torch.from_numpy(state))
    elif draw is not None:
        seed_generators(int(draw[-1]))


def find_draw(held_bytes: Callable[[], int]) -> str | None:
    """Name the random numbers by which a forward pass holds most, for `use_draw`; None if all hold the same."""
    held = {}
    with preserve_rng_state():
        for draw in _DRAWS:
            with suppress(Exception):  # As where nothing runs, and the loss has no gradient.
                use_draw(draw)
                held[draw] = held_bytes()
    return max(held, key=lambda draw: held[draw]) if len(set(held.values())) > 1 else None
