"""Data of every kind that is resumed anywhere: samplers and iterables that draw from every generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from small_data import DrawingBatches, DrawingRows, DrawingStream, StatefulBatches, drawing_collate
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

SIZES = [5, 3, 12, 1, 8, 8]
COUNT = sum(SIZES)


class GlobalSampler(Sampler[int]):
    """Draws from every global generator, as late as possible."""

    def __iter__(self) -> Iterator[int]:
        rest = list(range(COUNT))
        while rest:
            place = int((random.random() + np.random.rand() + torch.rand(()).item()) / 3 * len(rest))
            yield rest.pop(place)

    def __len__(self) -> int:
        return COUNT


class EpochSampler(Sampler[int]):
    """Knows its epoch only from `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % COUNT for index in range(COUNT)])

    def __len__(self) -> int:
        return COUNT


class OwnGenerator(Sampler[int]):
    """Draws from a generator under a name of its own, some numbers at the start and some late."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def draw(self, below: int) -> int:
        if isinstance(self.rng, torch.Generator):
            return int(torch.randint(below, (), generator=self.rng))
        return int(self.rng.integers(below) if isinstance(self.rng, np.random.Generator) else self.rng.randint(0, 99))

    def __iter__(self) -> Iterator[int]:
        rest, start = list(range(COUNT)), self.draw(COUNT)
        while rest:
            yield rest.pop((start + self.draw(COUNT)) % len(rest))

    def __len__(self) -> int:
        return COUNT


class Pairs(Sampler[list[int]]):
    """Takes its indices from another sampler, through a generator of its own as well."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.drawn = sampler, {"own": random.Random(4)}

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        self.drawn["own"].shuffle(indices)
        return (indices[at : at + 2] for at in range(0, COUNT, 2))


class AugmentedRows(DrawingRows):
    """Draws from generators of its own, one of them within an object, as libraries of augmentations have them."""

    def __init__(self) -> None:
        super().__init__(COUNT)
        self.rng, self.transform = np.random.RandomState(3), SimpleNamespace(random_generator=np.random.default_rng(3))

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.rng.rand() + self.transform.random_generator.random()


class StatefulLoader(DataLoader[Tensor]):
    """Like torchdata's: over an iterable, with a state of its own."""

    place, start = 0, 0

    def __iter__(self) -> Any:
        batches = super().__iter__()
        self.place, self.start = self.start, 0
        for _ in range(self.place):
            next(batches)
        return self._rest(batches)

    def _rest(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            self.place += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


class Unsavable(StatefulBatches):
    """Has a state that would run code when loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "what": StatefulBatches}


class Shuffling(DrawingBatches):
    """Buffers a few batches, and yields one of them at random."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[Tensor] = []
        for batch in super().__iter__():
            buffer.append(batch)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


class OwnStream(DrawingStream):
    """Adds numbers from a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Iterator[Tensor]:
        return (row + self.rng.random() for row in super().__iter__())


class ManyRows(IterableDataset[Tensor]):
    """Yields batches."""

    def __init__(self, sizes: list[int]) -> None:
        self.batches = DrawingBatches(sizes)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class DrawnOnce(DrawingBatches):
    """The same rows each time."""

    def __iter__(self) -> Iterator[Tensor]:
        random.seed(9)
        np.random.seed(9)
        torch.manual_seed(9)
        return super().__iter__()


MAP_STYLE: dict[str, Any] = {
    "dataset": lambda: DrawingRows(COUNT),
    "loader": lambda: DataLoader(DrawingRows(COUNT), 4, shuffle=True, collate_fn=drawing_collate),
    "larger batches": lambda: DataLoader(DrawingRows(COUNT), 16, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(DrawingRows(COUNT), 7, shuffle=True, generator=torch.Generator()),
    "sampler's generator": lambda: DataLoader(
        DrawingRows(COUNT), 4, sampler=RandomSampler(range(COUNT), replacement=True, generator=torch.Generator())
    ),
    "weighted": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)),
    "global generators": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=GlobalSampler()),
    "batch sampler": lambda: DataLoader(
        DrawingRows(COUNT), batch_sampler=BatchSampler(SubsetRandomSampler(range(COUNT)), 3, False)
    ),
    "batches of its own": lambda: DataLoader(DrawingRows(COUNT), batch_sampler=[list(range(n)) for n in range(1, 10)]),
    "epochs": lambda: DataLoader(DrawingRows(COUNT), 4, sampler=EpochSampler()),
    "dataset's own generators": lambda: DataLoader(AugmentedRows(), 4, shuffle=True),
    **{
        f"sampler's own {type(rng()).__name__}": lambda rng=rng: DataLoader(
            DrawingRows(COUNT), 4, sampler=OwnGenerator(rng())
        )
        for rng in (torch.Generator, random.Random, np.random.default_rng)
    },
    "batch sampler's own generators": lambda: DataLoader(
        DrawingRows(COUNT), batch_sampler=Pairs(OwnGenerator(torch.Generator()))
    ),
}
ITERABLE: dict[str, Any] = {
    "batches": lambda: DrawingBatches(SIZES),
    "list": lambda: list(DrawnOnce(SIZES)),
    "samples": lambda: DrawingStream(COUNT),
    "loader of samples": lambda: DataLoader(DrawingStream(COUNT), 4),
    "loader with a generator": lambda: DataLoader(DrawingStream(COUNT), 4, generator=torch.Generator()),
    "loader without batches": lambda: DataLoader(ManyRows(SIZES), batch_size=None),
    "stateful": lambda: StatefulBatches(SIZES),
    "stateful loader": lambda: StatefulLoader(DrawingStream(COUNT), 4),
    "unkeepable state": lambda: Unsavable(SIZES),
    "shuffling": lambda: Shuffling(SIZES),
    "generator of its own": lambda: OwnStream(COUNT),
    "loader over a generator of its own": lambda: DataLoader(OwnStream(COUNT), 4),
}
