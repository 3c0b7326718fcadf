"""What Python's and NumPy's generators give to each part of a batch: draws that no tensor operation shows."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from autoaccum.accumulation.randomness import Generator, generator_state, has_known_state, set_generator_state


class HostDraws:
    """Where these generators begin each part: the global ones, and others.

    Rewound, all parts are given what the first one drew, as is right for what is drawn once per forward and serves all
    samples. Onward, each part goes on where the one before has ended, as is right for what is drawn for each sample:
    the whole batch then draws the same.

    Args:
        named: Others, beside the global ones; torch's among them are passed over, whose draws can be given (`Draws`).
        onward: See above.

    Attributes:
        ends: Where they were as each part ended, to be compared: rewound, equal ends mean equal draws.
    """

    def __init__(self, named: Iterable[Generator] = (), *, onward: bool = False) -> None:
        self._named, self._onward = of_host(named), onward
        self._starts: dict[int, list[Any]] = {}
        self.ends: list[bytes] = []
        self._is_open = False

    def forget(self) -> None:
        """The next part to begin is the first again."""
        self._starts.clear()

    def begin(self, index: int, own: Iterable[Generator] = ()) -> None:
        """Put generators to where this part begins.

        Args:
            index: The part.
            own: Generators of this run alone, as of a model's copy; equal ones are given for each run.
        """
        self.finish()
        self._is_open = True
        generators = [*self._named, *of_host(own)]
        if index not in self._starts:
            now = host_places(generators)
            self._starts[index] = now if self._onward else next(iter(self._starts.values()), now)
        _put(generators, self._starts[index])

    def finish(self) -> None:
        """The part that began last, if any, is over."""
        if self._is_open:
            self.ends.append(pickle.dumps(host_places(self._named)))
        self._is_open = False


def of_host(generators: Iterable[Generator]) -> list[Generator]:
    """Those of Python and NumPy whose state can be told."""
    return [one for one in generators if not isinstance(one, torch.Generator) and has_known_state(one)]


def host_places(generators: Sequence[Generator]) -> list[Any]:
    """Where Python's and NumPy's global generators are, and these."""
    return [random.getstate(), np.random.get_state(), *map(generator_state, generators)]


def _put(generators: Sequence[Generator], places: Sequence[Any]) -> None:
    random.setstate(places[0])
    np.random.set_state(places[1])
    for generator, place in zip(generators, places[2:], strict=False):  # Runs without a copy of the model have fewer.
        set_generator_state(generator, place)
