"""Windows of a map-style dataset: a run resumes anywhere without rereading, and with the same items."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, default_collate

from autoaccum.accumulation.reachable_objects import find_generators
from autoaccum.accumulation.rng_state import derive_seed, item_seed, preserve_rng_state, seed_generators
from autoaccum.accumulation.schedule import slices, split_evenly
from autoaccum.checks import describe_type
from autoaccum.planning.plan_request import DEFAULT_WORST_OF
from autoaccum.sources.model_copies import fixed_seeds
from autoaccum.sources.samples import spread_indices
from autoaccum.training.data_windows import (
    END,
    DataSettings,
    Reader,
    Window,
    WindowSource,
    set_epoch,
    start_loader_epoch,
    worker_options,
)
from autoaccum.training.fit_events import Notice


class MapStyleSource(WindowSource):
    """Windows of a dataset with `__getitem__`; the position is an epoch and a number of samples.

    An epoch's order is drawn with seeds from run, epoch and window. Each item is fetched, and each part collated, with
    a seed from run, epoch and position. This seeds the CPU generators of Python, NumPy and torch, and those that the
    dataset, the collate function and the samplers hold, so a run resumes anywhere without rereading.

    Args:
        loader: The user's loader, whose order and collate function are used; None: shuffled in each epoch.
    """

    def __init__(self, dataset: Any, settings: DataSettings, loader: DataLoader[Any] | None = None) -> None:
        super().__init__(settings, "a map-style dataset" if loader is None else "a DataLoader over a map-style dataset")
        self._dataset, self._user_loader = dataset, loader
        if loader is None:
            self.samples_per_epoch = len(dataset)
            every = RandomSampler(range(max(len(dataset), 1)))
            self._sampler: Any = BatchSampler(every, settings.target_batch, False)
        else:
            self._sampler = loader.batch_sampler
            self.samples_per_epoch = _samples_per_epoch(self._sampler)
        # Lists of a custom batch sampler stay together.
        self._chooses_parts = type(self._sampler) is BatchSampler
        collate = settings.collate if loader is None else loader.collate_fn
        self._collate = default_collate if collate is None else collate
        self._loader: DataLoader[Any] = DataLoader(
            PartFetcher(dataset, self._collate, settings.seed),  # type: ignore[arg-type]
            batch_sampler=self,  # type: ignore[arg-type]
            collate_fn=_unchanged,
            generator=torch.Generator(),
            **worker_options(settings, loader),
        )
        self._reader: Reader | None = None
        self._asked: deque[_Asked] = deque()
        self._read = self._digest = 0
        self._committed = 0, 0
        self._begin(0)
        if self.samples_per_epoch is not None:
            self._check_fills_window(self.samples_per_epoch)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal on resuming."""
        samplers = (self._sampler, getattr(self._sampler, "sampler", None))
        order = " of ".join(type(sampler).__name__ for sampler in samplers if sampler is not None)
        order = "shuffled" if self._user_loader is None else order
        return {"kind": "map-style", "samples": self.samples_per_epoch, "order": order}

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """Return a function of the size that makes batches of the longest among samples spread over the dataset."""
        with fixed_seeds():
            samples = [self._dataset[index] for index in self._some_indices(worst_of or DEFAULT_WORST_OF)]
        return self._longest(samples, None if self._collate is default_collate else self._collate)

    def next_window(self) -> Window | None:
        """Return the next window, or None at the end of the epoch.

        Raises:
            UsageError: The epoch has fewer samples than a window.
            WorkloadError: `collate` returned another number of samples.
            DataWorkerError: A worker died. Errors of the data are raised unchanged.
        """
        with _on_card(self._settings.card), preserve_rng_state():
            if self._reader is None:  # Outside of `interruptible`, so that no process is left half started.
                self._loader.generator.manual_seed(derive_seed(self._settings.seed, "workers", self._epoch))
                self._reader = Reader(self._loader)
            with self.interruptible():
                parts, sizes, samples = self._read_parts(self._reader)
        if self._read == 0:
            self._check_fills_window(samples)
        if not samples:
            return None
        self._read += samples
        parts = parts if self._chooses_parts else self._join_alike(parts, sizes)
        return Window(parts, samples, self._digest)

    def commit(self) -> None:
        """Move the position past the last window, which was trained on or skipped."""
        self._committed = self._read, self._digest

    def state_dict(self) -> dict[str, Any]:
        """Return the position as of the last `commit`: epoch, samples, and a checksum of the indices so far."""
        samples, digest = self._committed
        return {"epoch": self._epoch, "samples": samples, "order": digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> Notice | None:
        """Go to a position without reading items. Return a warning if the order differs."""
        self._begin(state["epoch"])
        self._is_restored = True
        with preserve_rng_state():
            while self._read < state["samples"] and (following := next(self._windows, None)):
                self._read += sum(map(len, following[0]))
                self._digest = following[1]
        self.commit()
        if self._digest == state["order"]:
            return None
        return Notice("the sampler's order has changed: this epoch may omit or repeat samples")

    def close(self) -> None:
        """End the workers."""
        if self._reader is not None:
            self._reader.close()
            self._loader._iterator = None
            self._reader = None

    def __iter__(self) -> Iterator[PartRequest]:
        """Yield requests from the position on, as the DataLoader's batch sampler, which reads ahead."""
        position = self._read
        for window, digest in self._windows:
            lengths = list(map(len, window))
            own = [(number, window[number][first:last], first) for number, first, last in self._share(lengths)]
            at = position + (sum(lengths[: own[0][0]]) + own[0][2] if own else 0)
            parts = [part for _, part, _ in own]
            if self._chooses_parts and own:
                indices = list(chain.from_iterable(parts))
                cuts = slices(split_evenly(len(indices), self.part_size, self.multiple_of))
                parts = [indices[cut] for cut in cuts]
            for number, part in enumerate(parts or [[]], 1):  # A rank without samples asks for a part of none.
                self._asked.append(_Asked(len(part), sum(lengths), digest, number >= len(parts)))
                yield PartRequest(self._epoch, at, part)
                at += len(part)
            position += sum(lengths)

    def _begin(self, epoch: int) -> None:
        if not self._loader.persistent_workers:
            self.close()
        self._reader = None
        self._epoch, self._read, self._digest, self._committed = epoch, 0, 0, (0, 0)
        self._asked.clear()
        self._windows = _windows(self._sampler, self._user_loader, self._settings, epoch)

    def _read_parts(self, reader: Reader) -> tuple[list[Any], list[int], int]:
        """Read this rank's parts of a window; return them, their sizes, and the samples of the window."""
        parts, sizes = [], list[int]()
        while (part := reader.read()) is not END:
            asked = self._asked.popleft()
            self._digest = asked.digest
            if asked.samples:
                parts.append(self._check_collated(part, asked.samples))
                sizes.append(asked.samples)
            if asked.is_last:
                return parts, sizes, asked.of_window
        if self._asked:
            what = f"{describe_type(self._dataset)} or its collate function"
            raise RuntimeError(f"{what} raised StopIteration, which would end the epoch early")
        return parts, sizes, 0

    def _some_indices(self, most: int) -> Sequence[Any]:
        """Return indices spread over the dataset, or the sampler's first ones if samples are not numbered."""
        if hasattr(self._dataset, "__len__") and not isinstance(self._dataset, Mapping):
            return spread_indices(len(self._dataset), most)
        return list(islice(chain.from_iterable(self._sampler), most))


@dataclass(frozen=True)
class _Asked:
    """A part that was asked for: its samples, those of the window, the order's checksum, and whether it is the last."""

    samples: int
    of_window: int
    digest: int
    is_last: bool


@dataclass(frozen=True)
class PartRequest:
    """The content of one part: the epoch, the position of its first sample, and indices in the dataset."""

    epoch: int
    position: int
    indices: Sequence[Any]


class PartFetcher:
    """A dataset for torch's DataLoader: makes a part from a request, in this process or in a worker."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.users_dataset, self._collate, self._seed = dataset, collate, seed
        self._generators = find_generators(dataset, collate)
        self._epoch: int | None = None

    def __getitems__(self, request: PartRequest) -> Any:
        """Return the collated part."""
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            set_epoch(self.users_dataset, request.epoch)
        return self._part(request)

    def _part(self, request: PartRequest) -> Any:
        if not request.indices:
            return None
        is_plain = self._collate is default_collate
        if is_plain and type(self.users_dataset) is TensorDataset:
            return list(self.users_dataset[torch.as_tensor(request.indices)])  # As row by row; nothing is random.
        base, items = derive_seed(self._seed, "item", request.epoch), []
        for position, index in enumerate(request.indices, request.position):
            seed_generators(item_seed(base, position), self._generators)
            items.append(self.users_dataset[index])
        if not is_plain:
            seed = item_seed(derive_seed(self._seed, "collate", request.epoch), request.position)
            seed_generators(seed, self._generators)
        return self._collate(items)


def _unchanged(part: Any) -> Any:
    return part


def _windows(
    sampler: Any, loader: DataLoader[Any] | None, settings: DataSettings, epoch: int
) -> Iterator[tuple[list[list[Any]], int]]:
    """Yield each window's lists of indices and a checksum of all so far; leaves generators seeded."""
    lists: Iterator[Iterable[Any]] = iter(())
    rest: list[Any] = []
    digest = 0
    for number in count():
        seed = derive_seed(settings.seed, "order", epoch, number)
        seed_generators(seed)
        if number == 0:
            if loader is not None:
                start_loader_epoch(loader, epoch, seed, sampler)
            lists = iter(sampler)
        window, room = [], settings.target_batch
        while room > 0:
            if not rest:
                following = next(lists, None)
                if following is None:
                    break
                rest = list(following)
            window.append(rest[:room])
            rest = rest[room:]
            room -= len(window[-1])
        if room == settings.target_batch:
            return
        digest = zlib.crc32(repr(list(chain.from_iterable(window))).encode(), digest)
        yield [indices for indices in window if indices], digest


def _samples_per_epoch(sampler: Any) -> int | None:
    """Return the samples of an epoch for a plain batch sampler over a sampler with a length, else None."""
    if type(sampler) is not BatchSampler:
        return None
    try:
        total = len(sampler.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return total - total % sampler.batch_size if sampler.drop_last else total


def _on_card(card: torch.device | None) -> AbstractContextManager[Any]:
    """Make `card` the current GPU: pinned memory belongs to the current GPU's context."""
    return nullcontext() if card is None or not torch.cuda.is_available() else torch.cuda.device(card)
