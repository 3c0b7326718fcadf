"""Random generators that a dataset keeps for itself: seeded with every item, as the global ones are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from autoaccum.accumulation.randomness import GENERATORS, Generator, generator_rewind, has_known_state

_DEPTH = 5
"""How far from the dataset: a transform in a list of them, in a dataset that another one wraps."""

_MANY = 64
"""Longer lists and dicts are data."""

_VISITED = 10_000
"""Objects looked at in all."""


def find_generators(*roots: Any) -> list[Generator]:
    """The generators among the attributes of `roots`, and of what those keep, each once."""
    seen: set[int] = set()
    found = [value for root in roots for value in _values(root, _DEPTH, seen) if isinstance(value, GENERATORS)]
    return [one for one in found if has_known_state(one)]


def seed_own(generators: Sequence[Generator], seed: int) -> None:
    """Seed each of `generators` from `seed` and its number among them."""
    for number, generator in enumerate(generators):
        own = (seed + number) % 2**32
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            bits: Any = type(generator.bit_generator)
            generator.bit_generator.state = bits(own).state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(dict(type(generator._bit_generator)(own).state))  # seed() is for MT19937 only
        else:
            generator.seed(own)


@contextmanager
def kept_states(generators: Sequence[Generator]) -> Iterator[None]:
    """Put `generators` back, whatever is drawn meanwhile."""
    rewinds = [generator_rewind(generator) for generator in generators]
    try:
        yield
    finally:
        for rewind in rewinds:
            rewind()


def _values(node: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if id(node) in seen or len(seen) > _VISITED:
        return
    seen.add(id(node))
    yield node
    for value in _inside(node) if depth > 0 else ():
        yield from _values(value, depth - 1, seen)


def _inside(node: Any) -> list[Any]:
    if isinstance(node, (torch.Tensor, np.ndarray, type, ModuleType, *GENERATORS)):
        return []
    if isinstance(node, dict | list | tuple | set):
        return list(node.values() if isinstance(node, dict) else node) if len(node) <= _MANY else []
    if isinstance(node, MethodType | partial):
        return [node.__self__] if isinstance(node, MethodType) else [node.func, node.args, node.keywords]
    return list(getattr(node, "__dict__", {}).values())
