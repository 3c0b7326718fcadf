"""Items of a map-style dataset, fetched and collated under seeds that tell nothing but their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from autoaccum.accumulation.randomness import Generator
from autoaccum.training.data.ends import no_end
from autoaccum.training.data.kept_generators import find_generators, kept_states, seed_own
from autoaccum.training.seeds import item_seed, kept_randomness, mix, seed_generators
from autoaccum.workload.nests import kind


@dataclass(frozen=True)
class PartRequest:
    """What one part is made of.

    Attributes:
        seed: The run's.
        epoch: Counted from 0.
        place: Of its first sample in the epoch, counted from 0.
        indices: Of its samples in the dataset.
    """

    seed: int
    epoch: int
    place: int
    indices: Sequence[Any]


class PartFetcher:
    """Makes a part of a request, in this process or in a worker: a dataset, to torch's DataLoader.

    Each item is fetched under a seed of run, epoch, place and index (a sampler may ask for an item twice, to augment
    it differently), the part collated under one of its first sample. Seeded are the generators of Python, NumPy and
    torch on the CPU, and those that the dataset and `collate` keep for themselves.

    Args:
        dataset: Asked for one item at a time.
        collate: From a list of items to a batch; None: torch's `default_collate`.
        apart: Generators that something else draws from, part by part: a sampler's.

    Attributes:
        draws: Whether fetching may draw at random, and so leaves Python's, NumPy's and torch's generators seeded.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, apart: Iterable[Generator] = ()
    ) -> None:
        self.dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._collate_draws = self._collate is not default_collate
        self._apart = list(apart)
        self._epoch: int | None = None
        self.look()

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned: the sampler's generators are not for it."""
        return {**self.__dict__, "_apart": [], "_own": None}

    def look(self) -> None:
        """See what the dataset is by now: it may be changed from epoch to epoch."""
        self._items_draw = not _draws_nothing(self.dataset)
        self._columns = None if self._collate_draws else _columns(self.dataset)
        self.draws = self._items_draw or self._collate_draws
        self._own: list[Generator] | None = None

    @contextmanager
    def kept_randomness(self) -> Iterator[None]:
        """Put all generators back that fetching seeds."""
        with kept_randomness(), kept_states(self._own_generators(shared=False)):
            yield

    def __getitems__(self, request: PartRequest) -> Any:
        """The collated part."""
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            set_epoch(self.dataset, request.epoch)
            self.look()
        with kept_states(self._own_generators(shared=True)):
            try:
                return self._part(request)
            except StopIteration as error:
                raise no_end(f"{kind(self.dataset)} or its collate function") from error

    def _part(self, request: PartRequest) -> Any:
        gathered = None if self._columns is None else _gathered(self._columns, self.dataset, request.indices)
        if gathered is not None:
            return gathered
        items = self._items(request)
        if self._collate_draws:
            base = mix(request.seed, "collate", request.epoch)
            self._seed(item_seed(base, request.place, _number(request.indices[0])))
        return self._collate(items)

    def _items(self, request: PartRequest) -> list[Any]:
        if not self._items_draw:
            return [item(self.dataset, index) for index in request.indices]
        base, items = mix(request.seed, "item", request.epoch), []
        for place, index in enumerate(request.indices, request.place):
            self._seed(item_seed(base, place, _number(index)))
            items.append(item(self.dataset, index))
        return items

    def _seed(self, seed: int) -> None:
        seed_generators(seed)
        own = self._generators()
        if own:
            seed_own(own, seed)

    def _generators(self) -> list[Generator]:
        if self._own is None:
            # In a worker only once it has started: a user's worker_init_fn may give the dataset others.
            self._own = find_generators(self.dataset, self._collate)
        return self._own

    def _own_generators(self, *, shared: bool) -> list[Generator]:
        """Those of the dataset and `collate` that a sampler draws from as well, or those that none does."""
        apart = {id(generator) for generator in self._apart}
        return [generator for generator in self._generators() if (id(generator) in apart) is shared]


def item(dataset: Any, index: Any) -> Any:
    """One item; of a dataset that gives only several at once, a list of one."""
    if not hasattr(dataset, "__getitem__"):
        return dataset.__getitems__([index])[0]
    try:
        return dataset[index]
    except NotImplementedError:
        if not callable(getattr(dataset, "__getitems__", None)):
            raise
        return dataset.__getitems__([index])[0]


def _number(index: Any) -> int:
    """An index as a number, where it is one; other keys count as none, and have their place."""
    return int(index) if isinstance(index, int) else 0


def set_epoch(thing: Any, epoch: int) -> None:
    """Tell a sampler or a dataset its epoch, where it wants to know."""
    tell = getattr(thing, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def _draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is nothing but tensors; of a class of the user's own that is not known."""
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(part) for part in dataset.datasets)
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    return type(dataset) is TensorDataset


def _columns(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors whose rows are the samples, where a part is the same gathered at once as stacked row by row."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    plain = (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in dataset.tensors
    )
    return dataset.tensors if dataset.tensors and all(plain) else None


def _gathered(columns: Sequence[Tensor], dataset: Any, indices: Sequence[Any]) -> list[Tensor] | None:
    """The rows of `indices`; None where they are no plain row numbers, which is for the dataset to say."""
    while type(dataset) is Subset:
        if not _are_rows(indices, len(dataset.indices)):
            return None
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    if not _are_rows(indices, len(columns[0])):
        return None
    rows = torch.tensor(indices)
    return [column.index_select(0, rows.to(column.device)) for column in columns]


def _are_rows(indices: Sequence[Any], count: int) -> bool:
    return all(isinstance(index, int) and 0 <= index < count for index in indices)
