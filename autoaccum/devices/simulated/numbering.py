"""Hashes of tensors and modules that do not follow from where they lie, so that sets of them are in one order."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import torch

from autoaccum.devices.simulated.patches import replaced


class Numbering:
    """Numbers what it is asked for, in the order in which that happens."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._numbers = count()
        self._taken: frozenset[int] = frozenset()

    def number_of(self, thing: Any) -> int:
        """The number of `thing`, for as long as it lives."""
        key = id(thing)
        known = self._known.get(key)
        if known is None:
            number = next(number for number in self._numbers if number not in self._taken)
            known = self._known[key] = number, weakref.ref(thing, partial(self._forget, key))
        return known[0]

    def restart(self) -> None:
        """Count from 0 again: the order of a set depends on how large the numbers in it are.

        What is still alive keeps its own, which nothing else gets: a cache (`lru_cache`) would compare the two.
        """
        self._numbers = count()
        self._taken = frozenset(number for number, _ in self._known.values())

    def _forget(self, key: int, _: Any) -> None:
        self._known.pop(key, None)


def hash_by_number(numbering: Numbering, stack: ExitStack) -> None:
    """Have tensors and modules hash by numbers until `stack` is closed; by themselves they do by their addresses.

    Who iterates over a set of them (such as the parameters that do not decay) allocates in its order, which would be
    another one in each process.
    """

    def number_of(thing: Any) -> int:
        return numbering.number_of(thing)

    for kind in (torch.Tensor, torch.nn.Module):
        stack.enter_context(replaced(kind, "__hash__", number_of))
