"""Python's and NumPy's generators that a workload draws from, and whether it does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import numpy as np
from torch import nn

from autoaccum.accumulation.host_draws import host_places, of_host
from autoaccum.accumulation.randomness import Generator, generator_rewind, own_generators
from autoaccum.devices.in_place.reach import find_reachable
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.verification.specimen import Specimen
from autoaccum.workload.tracebacks import is_user_file

_OTHER_SEED = 1


class Chance:
    """Puts every generator to where all runs begin.

    Attributes:
        named: Generators of Python and NumPy that the workload's functions and classes name.
        is_kept: Whether modules keep generators of their own, of which each run has copies.

    Args:
        specimen: What is verified.
    """

    def __init__(self, specimen: Specimen) -> None:
        trained, workload = specimen.fresh(), specimen.workload
        modules = [module for root in trained.roots.values() for module in root.modules()]
        objective = workload.objective
        functions = [objective.loss_function, objective.weight_function, workload.accumulate, *_methods(modules)]
        if objective.criterion is not None:
            functions.append(objective.criterion.function)
        _, found = find_reachable([function for function in functions if function is not None])
        self.named: list[Generator] = of_host(found)
        self.is_kept = bool(of_host(own_generators(modules)))
        self._rewinds = [generator_rewind(generator) for generator in self.named]

    def seed(self) -> None:
        """Have all of them begin as every run does."""
        seed_everything()
        for rewind in self._rewinds:
            rewind()

    def seed_otherwise(self) -> None:
        """Have Python's and NumPy's begin elsewhere."""
        random.seed(_OTHER_SEED)
        np.random.seed(_OTHER_SEED)
        for generator in self.named:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(_OTHER_SEED).state
            elif isinstance(generator, (random.Random, np.random.RandomState)):
                generator.seed(_OTHER_SEED)

    def places(self) -> list[str]:
        """Where they are, to be compared: Python's, NumPy's, then `named`."""
        return [_text(place) for place in host_places(self.named)]

    def words(self, before: list[str], after: list[str]) -> str:
        """Whose generators are elsewhere now."""
        python = [before[0] != after[0]]
        numpy = [before[1] != after[1]]
        for generator, one, other in zip(self.named, before[2:], after[2:], strict=True):
            (python if isinstance(generator, random.Random) else numpy).append(one != other)
        used = [name for name, moved in (("Python's", python), ("NumPy's", numpy)) if any(moved)]
        return " and ".join(used)


def _methods(modules: list[nn.Module]) -> Iterator[FunctionType]:
    """Of the user's own classes."""
    for kind in dict.fromkeys(kind for module in modules for kind in type(module).__mro__):
        for value in vars(kind).values():
            if isinstance(value, FunctionType) and is_user_file(value.__code__.co_filename):
                yield value


def _text(place: Any) -> str:
    """All of a state: arrays are written as lists, which leave nothing out."""
    if isinstance(place, np.ndarray):
        return repr(place.tolist())
    if isinstance(place, dict):
        return repr({key: _text(value) for key, value in place.items()})
    return repr([_text(value) for value in place]) if isinstance(place, tuple) else repr(place)
