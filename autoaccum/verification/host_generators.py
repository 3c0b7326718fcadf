"""Python's and NumPy's generators that a workload may draw from: the global ones, and those that its code names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from autoaccum.accumulation.random_calls import calm
from autoaccum.accumulation.randomness import Generator, generator_rewind

_OTHER_SEED = 1


def host_state() -> tuple[bytes, bytes]:
    """Where Python's and NumPy's global generators are, to be compared."""
    kind, keys, *rest = np.random.get_state()
    return repr(random.getstate()).encode(), repr((kind, rest)).encode() + np.asarray(keys).tobytes()


@contextmanager
def calmed() -> Iterator[None]:
    """As `calm`; what draws an order or a place from Python's or NumPy's global generators gives the first one, too.

    Not held are generators of one's own (`default_rng`), and functions that are no more called by way of their module.
    """
    known = [(module, name, getattr(module, name)) for module, held in _HELD.items() for name in held]
    with calm():
        for module, name, _ in known:
            setattr(module, name, _HELD[module][name])
        try:
            yield
        finally:
            for module, name, function in known:
                setattr(module, name, function)


def _lowest(low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
    value = dtype(0 if high is None else low)
    return value if size is None else np.full(size, value)


def _in_order(items: Any) -> Any:
    return np.arange(items) if np.ndim(items) == 0 else np.array(items)


def _first(items: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
    ordered = _in_order(items)
    if size is None:
        return ordered[0]
    count = int(np.prod(size))
    return (ordered[np.zeros(count, dtype=int)] if replace else ordered[:count]).reshape(size)


_HELD: Mapping[Any, Mapping[str, Callable[..., Any]]] = {
    random: {
        "randint": lambda low, high: low,
        "choice": lambda items: items[0],
        "sample": lambda items, k, **_: list(items)[:k],
        "shuffle": lambda items: None,
    },
    np.random: {"randint": _lowest, "permutation": _in_order, "shuffle": lambda items: None, "choice": _first},
}
"""Of which the range follows from the number of samples; others give parts and the whole alike (`HostDraws`)."""


@contextmanager
def seeded_otherwise(generators: Sequence[Generator]) -> Iterator[None]:
    """Have the global generators, and these, begin elsewhere than all runs do; these are put back."""
    rewinds = [generator_rewind(generator) for generator in generators]
    random.seed(_OTHER_SEED)
    np.random.seed(_OTHER_SEED)
    for generator in generators:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(_OTHER_SEED).state
        elif isinstance(generator, (random.Random, np.random.RandomState)):
            generator.seed(_OTHER_SEED)
    try:
        yield
    finally:
        for rewind in rewinds:
            rewind()


def whose(before: tuple[bytes, bytes], generators: Sequence[Generator]) -> str:
    """Whose generators may have been drawn from: the global ones that are elsewhere now, and these.

    >>> whose(host_state(), [random.Random(1)])
    "Python's"
    """
    now = host_state()
    is_python = now[0] != before[0] or any(isinstance(one, random.Random) for one in generators)
    is_numpy = now[1] != before[1] or not all(isinstance(one, random.Random) for one in generators)
    return " and ".join(name for name, used in (("Python's", is_python), ("NumPy's", is_numpy)) if used)
