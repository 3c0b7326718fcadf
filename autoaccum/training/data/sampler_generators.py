"""Random generators that a loader and its samplers keep for themselves: an order goes on where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Sampler

from autoaccum.accumulation.randomness import GENERATORS, Generator
from autoaccum.training.checkpoints import random_states

_DEPTH = 3
"""How deep generators are looked for: the batch sampler, its sampler, and one that this wraps."""


def loader_generators(loader: DataLoader[Any]) -> dict[str, Generator]:
    """The generators that a loader and its samplers draw from, by name."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    found = dict(_generators(sampler, "sampler"))
    if loader.generator is not None and all(own is not loader.generator for own in found.values()):
        found["loader"] = loader.generator
    return found


def capture_generators(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Their states, as plain values."""
    captured: dict[str, Any] = random_states.capture((), generators)["generators"] if generators else {}
    return captured


def restore_generators(states: Mapping[str, Any], generators: Mapping[str, Generator]) -> list[str]:
    """Put them back; what could not be, as sentences."""
    if not generators and not states:
        return []
    return random_states.restore({**random_states.capture((), {}), "generators": states}, (), generators)


def chain(sampler: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """A sampler and those it keeps as attributes."""
    yield sampler
    if depth > 0:
        for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
            if isinstance(value, Sampler):
                yield from chain(value, depth - 1)


def _generators(sampler: Any, name: str) -> Iterator[tuple[str, Generator]]:
    seen = set()
    for number, one in enumerate(chain(sampler)):
        for attribute, value in vars(one).items() if hasattr(one, "__dict__") else ():
            if isinstance(value, GENERATORS) and id(value) not in seen:
                seen.add(id(value))
                yield f"{name}{number or ''}.{attribute}", value
