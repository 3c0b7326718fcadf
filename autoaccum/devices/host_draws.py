"""Random numbers that a step draws on the host, where they may decide what runs: stochastic depth, for example."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import torch
from torch import nn

from autoaccum.accumulation import rng_state
from autoaccum.accumulation.reachable_objects import find_python_attributes, find_reachable, find_user_methods
from autoaccum.sources.objective import Objective

_GLOBAL: Final = (random._inst, np.random.mtrand._rand, torch.default_generator)
_WORDS: Final = {"numbers near 1": 0x12DD9BB3, "numbers near 0": 0x953CF161}
"""Words of a Mersenne Twister's state that come out as 0xFFFFFFFF and 0x7F: 624 of these are drawn before others."""
_DRAWS = (*_WORDS, "those of seed 1", "those of seed 2", "those of seed 3")


def find_own_generators(objective: Objective, model: nn.Module) -> list[rng_state.Generator]:
    """Return the generators on the host that the code of the model and of the loss holds or names."""
    functions = [*objective.user_functions, *find_user_methods(model.modules())]
    found = find_reachable(functions, find_python_attributes(model))[1]
    return [one for one in found if rng_state.has_readable_state(one) and "cuda" not in str(getattr(one, "device", ""))]


def generator_states(own: Sequence[rng_state.Generator] = ()) -> bytes:
    """Return the states of the host's generators, and of the workload's `own`, to be compared."""
    states = [rng_state.generator_state(one) for one in (*_GLOBAL, *own)]
    return pickle.dumps([state.tolist() if isinstance(state, torch.Tensor) else state for state in states])


@contextmanager
def drawing(draw: str | None, own: Sequence[rng_state.Generator] = ()) -> Iterator[None]:
    """Draw numbers that `find_draw` has returned, also from `own`, and restore all at the end; None: as they come."""
    before = rng_state.RngState(generators=own)
    bits = [(one, one.bit_generator) for one in own if draw and isinstance(one, np.random.Generator)]
    try:
        for one, _ in bits:  # Its own, PCG64, cannot draw one number again and again, and then others.
            np.random.Generator.__init__(one, np.random.MT19937())
        if draw in _WORDS:
            words = [_WORDS[draw]] * 624
            state = torch.get_rng_state().numpy().copy()  # Seed, words left, whether seeded, next word, and the words.
            state[:5016].view(np.uint64)[1:] = [624 | 1 << 32, 0, *words]
            states = {random.Random: (3, (*words, 0), None), torch.Generator: torch.from_numpy(state)}
            numpy = ("MT19937", np.array(words, np.uint32), 0, 0, 0.0)
            for each in (*_GLOBAL, *own):
                rng_state.set_generator_state(each, next((states[k] for k in states if isinstance(each, k)), numpy))
        elif draw is not None:
            rng_state.seed_generators(int(draw[-1]), own)
        yield
    finally:
        for one, former in bits:
            np.random.Generator.__init__(one, former)
        if draw is not None:
            before.restore()


def find_draw(held_bytes: Callable[[], int], own: Sequence[rng_state.Generator] = ()) -> str | None:
    """Name the random numbers by which a forward pass holds most, for `drawing`; None if all hold the same."""
    held = {}
    for draw in _DRAWS:
        with suppress(Exception), drawing(draw, own):  # As where nothing runs, and the loss has no gradient.
            held[draw] = held_bytes()
    return max(held, key=lambda draw: held[draw]) if len(set(held.values())) > 1 else None
