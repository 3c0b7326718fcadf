"""Python's and NumPy's generators that a workload may draw from: the global ones, and those that its code names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from autoaccum.accumulation.randomness import Generator, generator_rewind

_OTHER_SEED = 1


def host_state() -> tuple[bytes, bytes]:
    """Where Python's and NumPy's global generators are, to be compared."""
    kind, keys, *rest = np.random.get_state()
    return repr(random.getstate()).encode(), repr((kind, rest)).encode() + np.asarray(keys).tobytes()


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
