"""A map-style dataset as windows: nothing is read twice, and every item is the same however the run was cut."""

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

from autoaccum.accumulation.rng_state import GENERATORS
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.checks import describe_type
from autoaccum.planning.plan_request import DEFAULT_WORST_OF
from autoaccum.training.data_windows import DataSettings, Window, WindowSource, set_epoch, start_loader_epoch
from autoaccum.training.data_workers import END, Reader, to_shared_memory, worker_options
from autoaccum.training.seeds import derive_seed, item_seed, preserve_rng_state, seed_generators
from autoaccum.workload.model_copies import fixed_seeds
from autoaccum.workload.samples import spread_indices


class MapStyleSource(WindowSource):
    """Windows of a dataset with `__getitem__`; its place is an epoch and a number of samples.

    An epoch's order is drawn under seeds of run, epoch and window; each item is fetched, and each part collated, under
    one of run, epoch and place. Seeded are the generators of Python, NumPy and torch on the CPU. So a run goes on
    anywhere without reading anything again. A generator that a dataset, or a sampler of one's own, keeps for itself is
    not seeded.

    Args:
        dataset: Asked for one item at a time.
        settings: What it is read by.
        loader: The user's loader over it, whose order and collate function it is then; None: shuffled in each epoch.
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
            self.samples_per_epoch = _samples_of(self._sampler)
        collate = settings.collate if loader is None else loader.collate_fn
        self._collate = default_collate if collate is None else collate
        self._loader: DataLoader[Any] = DataLoader(
            PartFetcher(dataset, self._collate, settings.seed),  # type: ignore[arg-type]
            batch_sampler=self,  # type: ignore[arg-type]
            collate_fn=to_shared_memory,
            generator=torch.Generator(),
            **worker_options(settings, loader),
        )
        self._reader: Reader | None = None
        self._sizes: deque[tuple[int, int]] = deque()
        self._read = self._digest = 0
        self._done = 0, 0
        self._begin(0)
        if self.samples_per_epoch is not None:
            self._check_first(self.samples_per_epoch)

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        samplers = (self._sampler, getattr(self._sampler, "sampler", None))
        order = " of ".join(type(sampler).__name__ for sampler in samplers if sampler is not None)
        order = "shuffled" if self._user_loader is None else order
        return {"kind": "map-style", "samples": self.samples_per_epoch, "order": order}

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """A function of a size, to plan with: batches of the longest of samples from all over the dataset."""
        with fixed_seeds():
            samples = [self._dataset[index] for index in self._some_indices(worst_of or DEFAULT_WORST_OF)]
        return self._longest(samples, None if self._collate is default_collate else self._collate)

    def next_window(self) -> Window | None:
        """The next window; None when the epoch is over.

        Raises:
            UsageError: The epoch has fewer samples than a window.
            WorkloadError: `collate` makes another number of samples.
            DataWorkerError: A worker died. What the data raises comes through.
        """
        with _current(self._settings.card), preserve_rng_state():
            if self._reader is None:  # Outside of `interruptible`: processes are not left half started.
                self._loader.generator.manual_seed(derive_seed(self._settings.seed, "workers", self._epoch))
                self._reader = Reader(self._loader)
            with self.interruptible():
                parts, sizes = self._read_parts(self._reader)
        samples = sum(sizes)
        if self._read == 0:
            self._check_first(samples)
        if not samples:
            return None
        self._read += samples
        return Window(parts if self._makes_parts else self._joined(parts, sizes), samples)

    def commit(self) -> None:
        """Move behind the last window: it was trained on, or passed over for good."""
        self._done = self._read, self._digest

    def state_dict(self) -> dict[str, Any]:
        """The place as of the last `commit`: epoch, samples, and a checksum of the indices so far."""
        samples, digest = self._done
        return {"epoch": self._epoch, "samples": samples, "order": digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go to a place; no item is read. Says so where the order, or what is drawn, is not known to be the same."""
        self._begin(state["epoch"])
        self._is_restored = True
        with preserve_rng_state():
            while self._read < state["samples"] and (following := next(self._windows, None)):
                self._read += sum(map(len, following[0]))
                self._digest = following[1]
        self.commit()
        if self._digest != state["order"]:
            return "the sampler gives another order than before: samples may be left out or come twice in this epoch"
        if any(isinstance(value, GENERATORS) for value in getattr(self._dataset, "__dict__", {}).values()):
            return (
                f"{describe_type(self._dataset)} keeps a random generator for itself, which is not where it was: draw"
                " from those of Python, NumPy or torch, and what is drawn is the same"
            )
        return None

    def close(self) -> None:
        """End the workers."""
        if self._reader is not None:
            self._reader.close()
            self._loader._iterator = None
            self._reader = None

    def __iter__(self) -> Iterator[PartRequest]:
        """What the DataLoader takes for its batch sampler: requests from the place on, asked for ahead of reading."""
        place = self._read
        for window, digest in self._windows:
            if self._makes_parts:
                indices = list(chain.from_iterable(window))
                cuts = iter(indices)
                window = [
                    list(islice(cuts, size)) for size in split_evenly(len(indices), self.part_size, self.multiple_of)
                ]
            for part in window:
                self._sizes.append((len(part), digest))
                yield PartRequest(self._epoch, place, part)
                place += len(part)

    @property
    def _makes_parts(self) -> bool:
        """Whether parts are ours to make; the lists of a batch sampler of one's own stay together."""
        return type(self._sampler) is BatchSampler

    def _begin(self, epoch: int) -> None:
        if not self._loader.persistent_workers:
            self.close()
        self._reader = None
        self._epoch, self._read, self._digest, self._done = epoch, 0, 0, (0, 0)
        self._sizes.clear()
        self._windows = _windows(self._sampler, self._user_loader, self._settings, epoch)

    def _read_parts(self, reader: Reader) -> tuple[list[Any], list[int]]:
        room = self._settings.target_batch
        parts: list[Any] = []
        sizes: list[int] = []
        while room > 0 and (part := reader.read()) is not END:
            size, self._digest = self._sizes.popleft()
            parts.append(self._counted(part, size))
            sizes.append(size)
            room -= size
        return parts, sizes

    def _some_indices(self, most: int) -> Sequence[Any]:
        """Spread over the dataset; those a sampler gives first, where it has no numbered samples."""
        if hasattr(self._dataset, "__len__") and not isinstance(self._dataset, Mapping):
            return spread_indices(len(self._dataset), most)
        return list(islice(chain.from_iterable(self._sampler), most))


@dataclass(frozen=True)
class PartRequest:
    """What one part is made of: the epoch, the place of its first sample there, and indices in the dataset."""

    epoch: int
    place: int
    indices: Sequence[Any]


class PartFetcher:
    """Makes a part of a request, in this process or in a worker: a dataset, to torch's DataLoader.

    Args:
        dataset: The user's.
        collate: From a list of items to a batch.
        seed: The run's.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.users_dataset, self._collate, self._seed = dataset, collate, seed
        self._epoch: int | None = None

    def __getitems__(self, request: PartRequest) -> Any:
        """The collated part."""
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            set_epoch(self.users_dataset, request.epoch)
        try:
            return self._part(request)
        except StopIteration as error:  # A DataLoader would take it for its own end.
            what = f"{describe_type(self.users_dataset)} or its collate function"
            raise RuntimeError(f"{what} raised StopIteration, which would end the epoch early") from error

    def _part(self, request: PartRequest) -> Any:
        is_plain = self._collate is default_collate
        if is_plain and type(self.users_dataset) is TensorDataset:
            return list(
                self.users_dataset[torch.as_tensor(request.indices)]
            )  # The same as row by row, and draws nothing.
        base, items = derive_seed(self._seed, "item", request.epoch), []
        for place, index in enumerate(request.indices, request.place):
            seed_generators(item_seed(base, place))
            items.append(self.users_dataset[index])
        if not is_plain:
            seed_generators(item_seed(derive_seed(self._seed, "collate", request.epoch), request.place))
        return self._collate(items)


def _windows(
    sampler: Any, loader: DataLoader[Any] | None, settings: DataSettings, epoch: int
) -> Iterator[tuple[list[list[Any]], int]]:
    """Each window's lists of indices, and a checksum of all so far; random states are left seeded."""
    lists: Iterator[Iterable[Any]] = iter(())
    rest: list[Any] = []
    digest = 0
    for number in count():
        seed = derive_seed(settings.seed, "order", epoch, number)
        seed_generators(seed)
        if number == 0:
            if loader is not None:
                start_loader_epoch(loader, epoch, seed)
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


def _samples_of(sampler: Any) -> int | None:
    """How many an epoch has, where a plain batch sampler has a sampler with a length."""
    if type(sampler) is not BatchSampler:
        return None
    try:
        total = len(sampler.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return total - total % sampler.batch_size if sampler.drop_last else total


def _current(card: torch.device | None) -> AbstractContextManager[Any]:
    """Make `card` the current one: memory is pinned through the current one's context."""
    return nullcontext() if card is None or not torch.cuda.is_available() else torch.cuda.device(card)
