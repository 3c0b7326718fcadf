"""The order of a map-style dataset's samples in an epoch, as lists of indices."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autoaccum.accumulation.randomness import Generator
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.training.data.fetching import set_epoch
from autoaccum.training.data.sampler_generators import (
    capture_generators,
    chain,
    loader_generators,
    restore_generators,
)
from autoaccum.training.seeds import RandomStream, mix
from autoaccum.workload.worst_case import spread_indices

_LOOKED_AT = 4096


class Order(Protocol):
    """Which samples an epoch has, in which order, and in which lists they are fetched.

    Attributes:
        makes_parts: Whether its lists are the parts to train on; if not, what was fetched is joined where it can be.
        kind: What makes it, in words: another kind is another order.
        draws: Whether its lists may be drawn from the global generators.
    """

    makes_parts: bool
    kind: str
    draws: bool

    @property
    def samples(self) -> int | None:
        """How many an epoch has; None where nothing tells."""

    @property
    def generators(self) -> dict[str, Generator]:
        """Generators of the user's own that it draws from, by name."""

    def lists(
        self, epoch: int, skipped: int, target_batch: int, part_size: int, multiple_of: int = 1
    ) -> Iterator[list[Any]]:
        """Lists of indices behind the first `skipped` samples; none crosses a window's boundary."""

    def some(self, count: int) -> list[Any]:
        """At most `count` indices from all over an epoch, drawn without a trace."""


class ShuffledOrder:
    """All samples once, in a permutation of run and epoch, in even parts."""

    makes_parts = True
    kind = "shuffled"
    draws = False

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.generators: dict[str, Generator] = {}
        self._seed = seed

    def lists(
        self, epoch: int, skipped: int, target_batch: int, part_size: int, multiple_of: int = 1
    ) -> Iterator[list[Any]]:
        """Each window's samples divided evenly, as a plan divides them."""
        shuffle = torch.Generator().manual_seed(mix(self._seed, "order", epoch))
        order = torch.randperm(self.samples, generator=shuffle)[skipped:]
        for window in torch.split(order, target_batch) if len(order) else ():
            for part in torch.split(window, list(split_evenly(len(window), part_size, multiple_of))):
                yield part.tolist()

    def some(self, count: int) -> list[Any]:
        """Spread over the dataset."""
        return list(spread_indices(self.samples, count))


class SampledOrder:
    """The order of a loader's own batch sampler, in lists as long as its batches.

    Samplers that draw from the global generators do so from a stream of run and epoch, which leaves the caller's
    alone. Those with a generator of their own go on from where it is, as under a DataLoader.
    """

    makes_parts = False
    draws = True

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._sampler: Iterable[Iterable[Any]] = loader.batch_sampler  # type: ignore[assignment]
        self._loader_generator: torch.Generator | None = loader.generator
        self._dataset, self._seed = loader.dataset, seed
        self.kind = _kind(self._sampler)
        self._draws_later = not _draws_at_start_only(self._sampler)
        self.generators = loader_generators(loader)

    @property
    def samples(self) -> int | None:
        """How many an epoch has, where a plain batch sampler has a sampler with a length."""
        sampler = self._sampler
        if type(sampler) is not BatchSampler:
            return None
        try:
            total = len(sampler.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        return total - total % sampler.batch_size if sampler.drop_last else total

    def lists(
        self, epoch: int, skipped: int, target_batch: int, part_size: int, multiple_of: int = 1
    ) -> Iterator[list[Any]]:
        """The sampler's lists, cut where a window ends and nowhere else."""
        place = 0
        for indices in self._drawn(self._sampler, epoch, target_batch):
            dropped = min(skipped, len(indices))
            skipped -= dropped
            for part in _cut(indices[dropped:], place, target_batch):
                place += len(part)
                yield part

    def some(self, count: int) -> list[Any]:
        """Spread over what torch's own samplers choose from; else over the first thousands that a copy gives."""
        known = _chosen_from(self._sampler)
        if known is None:
            known = self._first()
        return [known[place] for place in spread_indices(len(known), count)]

    def _first(self) -> Sequence[Any]:
        sampler = self._copied()
        if sampler is None and isinstance(self._dataset, Sized) and not isinstance(self._dataset, Mapping):
            return range(len(self._dataset))
        states = capture_generators(self.generators)
        try:
            lists = self._drawn(self._sampler if sampler is None else sampler, 0, _LOOKED_AT)
            return list(itertools.islice(itertools.chain.from_iterable(lists), _LOOKED_AT))
        finally:
            restore_generators(states, self.generators)

    def _copied(self) -> Iterable[Iterable[Any]] | None:
        """The sampler with all it keeps but data and generators; None where it cannot be copied."""
        inside = (value for one in chain(self._sampler) for value in getattr(one, "__dict__", {}).values())
        kept = [self._dataset, *self.generators.values(), *(value for value in inside if isinstance(value, Dataset))]
        try:
            return copy.deepcopy(self._sampler, {id(value): value for value in kept})
        except Exception:  # whatever a class of the user's own does when it is copied
            return None

    def _drawn(self, lists_of: Iterable[Iterable[Any]], epoch: int, enough: int) -> Iterator[list[Any]]:
        """Lists of a sampler, read in blocks of at least `enough` indices: swapping random states takes a while."""
        for sampler in chain(lists_of):
            set_epoch(sampler, epoch)
        if self._loader_generator is not None:
            # As a DataLoader does for its workers, before its sampler draws: the order is the one a loop would see.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
        stream = RandomStream(mix(self._seed, "order", epoch))
        with stream.running():
            lists = iter(lists_of)
            block = _block(lists, enough)
        while block:
            yield from block
            if self._draws_later:
                with stream.running():
                    block = _block(lists, enough)
            else:
                block = _block(lists, enough)


def _block(lists: Iterator[Iterable[Any]], enough: int) -> list[list[Any]]:
    block, count = [], 0
    for indices in lists:
        block.append(list(indices))
        count += len(block[-1])
        if count >= enough:
            break
    return block


def _cut(indices: list[Any], place: int, target_batch: int) -> Iterator[list[Any]]:
    while indices:
        room = target_batch - place % target_batch
        yield indices[:room]
        indices, place = indices[room:], place + min(room, len(indices))


def _kind(sampler: Any) -> str:
    """The classes of a batch sampler and its sampler: `BatchSampler of RandomSampler`."""
    inner = getattr(sampler, "sampler", None)
    return type(sampler).__name__ if inner is None else f"{type(sampler).__name__} of {type(inner).__name__}"


def _chosen_from(batch_sampler: Any) -> Sequence[Any] | None:
    """The indices that torch's own samplers choose from; None for others."""
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else None
    if type(sampler) in (RandomSampler, SequentialSampler):
        return range(len(sampler.data_source))  # type: ignore[union-attr]
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    if type(sampler) is WeightedRandomSampler:
        chosen: list[int] = sampler.weights.nonzero().flatten().tolist()
        return chosen
    return None


def _draws_at_start_only(sampler: Any) -> bool:
    """Whether torch's own samplers, which draw from the global generator before their first index, are all there is."""
    return type(sampler) is BatchSampler and type(sampler.sampler) in (RandomSampler, SequentialSampler)
