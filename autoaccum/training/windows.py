"""Windows of training data, the samples of one update each, from a position that can be saved and restored.

Items of a map-style dataset are fetched with seeds of their own, so that a run resumes anywhere without rereading.
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from autoaccum.accumulation.packing import cut_windows, pack, share_by_length
from autoaccum.accumulation.reachable_objects import find_generators
from autoaccum.accumulation.rng_state import derive_seed, preserve_rng_state, seed_generators
from autoaccum.accumulation.schedule import even_parts, slices, split_evenly
from autoaccum.checks import describe_type
from autoaccum.errors import UsageError
from autoaccum.messages import message
from autoaccum.planning.plan_request import DEFAULT_LONGEST_OF
from autoaccum.sources.batches import BatchReader, read_batch
from autoaccum.sources.model_copies import fixed_seeds
from autoaccum.sources.samples import TOKEN_SAMPLES, LongestBatches, some_samples, take_longest
from autoaccum.sources.token_costs import TokenCosts, read_lengths
from autoaccum.sources.workload import Workload
from autoaccum.training.data_workers import END, Entries, PartFetcher, PartRequest, set_epoch, worker_options
from autoaccum.training.fit_events import Notice


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings for reading data of any kind.

    Attributes:
        target_batch: Samples of a window; None with `target_tokens`.
        seed: The seed of order and augmentation, together with the epoch.
        workers: Processes that read ahead, unless the data is a DataLoader with its own workers.
        collate: Builds a batch from a list of samples; None: torch's `default_collate`. A DataLoader has its own.
        batching: How batches are counted and split; None: by rows.
        card: The GPU for which parts are put into pinned memory; None: no pinned memory.
        rank: The number of this rank, whose share of each window is read.
        ranks: The number of ranks.
        target_tokens: Tokens of a window: it has as many whole samples as reach them.
        costs: How samples are measured in tokens.
        lengths: The tokens of each sample of a map-style dataset; None: each is measured when it is first needed.
    """

    target_batch: int | None
    seed: int
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    batching: BatchReader = None
    card: torch.device | None = None
    rank: int = 0
    ranks: int = 1
    target_tokens: int | None = None
    costs: TokenCosts = TokenCosts()
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class Window:
    """The samples of one update, as parts for `Accumulator.step_parts`.

    Attributes:
        parts: Collated batches on the CPU, in order. Each may have its own structure, such as padding. Of several
            ranks, those of this one.
        samples: Samples of all parts of all ranks: the target batch, or fewer at the end of an epoch.
        checksum: A checksum of the data up to here, as far as it is known without reading: equal on all ranks.
    """

    parts: list[Any]
    samples: int
    checksum: int = 0


class WindowReader(abc.ABC):
    """Windows of data, epoch after epoch, from a position that can be saved and restored.

    Args:
        settings: How to read.
        name: A description of the data for messages: `a map-style dataset`.

    Attributes:
        part_size: The largest part to make, in samples. Set this and the following before the first window.
        micro_tokens: In place of it, the most tokens of a part; None: parts are made by their samples.
        multiple_of: Part sizes are multiples of this; what is left over in an epoch is a part of its own.
        interruptible: Context in which `next_window` waits or runs the user's code, and may be interrupted at any
            moment without loss. Random states are restored outside of it.
        samples_per_epoch: Samples of an epoch; None if the data has no known length.
        fingerprint: What must be equal on resuming.
    """

    def __init__(
        self, settings: DataSettings, name: str, samples_per_epoch: int | None, fingerprint: dict[str, Any]
    ) -> None:
        self.part_size, self.multiple_of = settings.target_batch or 1, 1
        self.micro_tokens: int | None = None
        self.interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.samples_per_epoch, self.fingerprint = samples_per_epoch, fingerprint
        self._settings, self._name = settings, name
        self._entries: Entries | None = None
        self._epoch, self._windows, self._checksum, self._has_ended = 0, 0, 0, False

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch, counted from 0, unless the position is in it already, as after `load_state_dict`."""
        if epoch != self._epoch:
            self._begin(epoch)

    def next_window(self) -> Window | None:
        """Return the next window, or None at the end of the epoch.

        Raises:
            UsageError: The epoch has fewer samples than a window, or the data yields something that is not a batch.
            WorkloadError: `collate` returned another number of samples.
            DataWorkerError: A worker died. Errors of the data are raised unchanged.
        """
        if self._has_ended:
            return None
        with _on_card(self._settings.card), preserve_rng_state():
            self._open()  # Outside of `interruptible`, so that no process is left half started.
            with self.interruptible():
                parts, samples, reached = self._read_window()
        if self._windows == 0:
            self._check_fills_window(reached, self._epoch)
        self._windows += bool(samples)
        return Window(parts, samples, self._checksum) if samples else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last window; `own` is the data's own state, if it has one."""
        position = {"epoch": self._epoch, "windows": self._windows, "ended": self._has_ended}
        return {**position, "checksum": self._checksum, "own": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> Notice | None:
        """Go to a position; return a note if the data was read forward, or a warning if its order differs.

        Raises:
            UsageError: The data ends before it.
        """
        self._begin(state["epoch"])
        notice = self._go_to(state)
        self._windows, self._has_ended = state["windows"], state["ended"]
        return notice

    def close(self) -> None:
        """End the workers, except those that the user's loader keeps from epoch to epoch."""
        if self._entries is not None:
            self._entries.close(include_persistent=False)
            self._entries = None

    @abc.abstractmethod
    def with_planning_batches(self, workload: Workload, longest_of: int | None) -> Workload:
        """Return the workload with batches made of this data, the longest of `longest_of` samples or a first batch."""

    @abc.abstractmethod
    def _length(self, sample: Any) -> int:
        """Return the tokens of a sample, of which a map-style dataset gives the index."""

    @abc.abstractmethod
    def _open(self) -> None:
        """Open the data if necessary, and seed for the next window."""

    @abc.abstractmethod
    def _read_window(self) -> tuple[list[Any], int, int]:
        """Read this rank's parts of a window; return them, the window's samples, and what it has of the target.

        The samples are 0 at the end.
        """

    @abc.abstractmethod
    def _go_to(self, state: Mapping[str, Any]) -> Notice | None:
        """Go from the start of an epoch to a position in it."""

    def _begin(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.close()
        self._epoch, self._windows, self._checksum, self._has_ended = epoch, 0, 0, False

    def _share(self, samples: int) -> slice:
        """Return this rank's share of a window of `samples`.

        Shares are consecutive, differ by at most `multiple_of`, and the last rank has what makes no multiple.
        """
        whole, left = divmod(samples, self.multiple_of)
        shares = [share * self.multiple_of for share in even_parts(whole, self._settings.ranks)]
        shares[-1] += left
        return slices(shares)[self._settings.rank]

    def _cut(self, samples: Iterable[Any]) -> Iterator[list[tuple[Any, int]]]:
        """Cut an epoch's samples into windows, each with what it adds to the target: its length, or 1."""
        target_batch, target_tokens = self._settings.target_batch, self._settings.target_tokens
        measured = ((sample, 1 if target_tokens is None else self._length(sample)) for sample in samples)
        return cut_windows(measured, target_batch, target_tokens)

    def _places(self, window: list[tuple[Any, int]]) -> Sequence[Sequence[int]]:
        """Return which samples of a window each part of this rank has."""
        if self.micro_tokens is None:
            share = range(len(window))[self._share(len(window))]
            sizes = split_evenly(len(share), self.part_size, self.multiple_of) if share else ()
            return [share[part] for part in slices(sizes)]
        is_measured = self._settings.target_tokens is not None
        lengths = [added if is_measured else self._length(sample) for sample, added in window]
        of_rank = share_by_length(lengths, self._settings.ranks)[self._settings.rank]
        return pack(lengths, self.micro_tokens, self._settings.costs.padding, of_rank)

    def _check_fills_window(self, reached: int, epoch: int = 0) -> None:
        """Raise UsageError for an epoch smaller than a window: no smaller batch than requested is trained silently."""
        if reached == 0 and epoch > 0:
            raise UsageError(
                f"{self._name} yields nothing in epoch {epoch + 1}: it can be iterated only once",
                hint="give data that starts again each time (a list, a DataLoader, an object with __iter__), or use"
                " fewer epochs",
            )
        if reached == 0:
            raise UsageError(f"{self._name} has no samples", hint="give data with at least one window of samples")
        target, unit, name = self._settings.target_batch, "samples", "batch"
        if target is None:
            target, unit, name = self._settings.target_tokens or 1, "tokens", "tokens"
        if reached < target:
            raise UsageError(
                f"{self._name} has {reached:,} {unit}, fewer than one update ({target:,})",
                hint=f"use --target-{name} {reached} or less (target_{name} in code), or give more data",
            )

    def _with_longest(
        self, workload: Workload, dataset: Any, collate: Callable[[list[Any]], Any] | None, number: int
    ) -> Workload:
        """Return the workload with batches of the longest of so many samples, and without the dataset itself."""
        of_data = dataclasses.replace(workload, dataset=dataset, collate=collate)
        kept = self._settings.target_batch or DEFAULT_LONGEST_OF
        return dataclasses.replace(take_longest(of_data, number, kept), dataset=None)

    def _read_collated(self, part: Any, size: int, again: Callable[[int], Any]) -> Any:
        return read_batch(part, self._settings.batching, size, "collate()", again)


class MapStyleReader(WindowReader):
    """Windows of a dataset with `__getitem__`.

    An epoch's order is drawn with seeds from run, epoch and window. Each item is fetched, and each part collated, with
    a seed from run, epoch and position. This seeds the CPU generators of Python, NumPy and torch, and those that the
    dataset, the collate function and the samplers hold.

    Args:
        loader: The user's loader, whose order and collate function are used; None: shuffled in each epoch.
    """

    def __init__(self, dataset: Any, settings: DataSettings, loader: DataLoader[Any] | None = None) -> None:
        if loader is None:
            sampler: Any = BatchSampler(RandomSampler(range(max(len(dataset), 1))), settings.target_batch or 1, False)
            order, collate = "shuffled", settings.collate
        else:
            sampler, collate = loader.batch_sampler, loader.collate_fn
            order = type(sampler).__name__
            order += f" of {type(sampler.sampler).__name__}" if hasattr(sampler, "sampler") else ""
        samples = len(dataset) if loader is None else _samples_per_epoch(sampler)
        name = "a map-style dataset" if loader is None else "a DataLoader over a map-style dataset"
        super().__init__(settings, name, samples, {"kind": "map-style", "samples": samples, "order": order})
        self._dataset, self._user_loader, self._sampler = dataset, loader, sampler
        self._collate = None if collate is default_collate else collate
        self._loader: DataLoader[Any] = DataLoader(
            PartFetcher(dataset, self._collate, settings.seed),  # type: ignore[arg-type]
            batch_sampler=self,  # type: ignore[arg-type]
            collate_fn=_unchanged,
            generator=torch.Generator(),
            **worker_options(settings.workers, loader, pin_memory=settings.card is not None),
        )
        self._asked: deque[tuple[int, int, int, Sequence[int]]] = deque()
        self._lengths = None if settings.lengths is None else read_lengths(settings.lengths, len(dataset))
        self._measured: dict[Any, int] = {}
        self._begin(0)
        if samples is not None and not (samples and settings.target_tokens):
            self._check_fills_window(samples)

    def with_planning_batches(self, workload: Workload, longest_of: int | None) -> Workload:
        """Return the workload with batches of the longest among samples spread over the dataset."""
        number, dataset = longest_of or samples_to_read(workload), self._dataset
        if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__"):  # Samples are not numbered.
            dataset = [dataset[index] for index in islice(chain.from_iterable(self._sampler), number)]
        return self._with_longest(workload, dataset, self._collate, number)

    def close(self) -> None:
        """End the workers."""
        if self._entries is not None:
            self._entries.close()
            self._loader._iterator = None
            self._entries = None

    def __iter__(self) -> Iterator[PartRequest]:
        """Yield requests from the position on, as the DataLoader's batch sampler, which reads ahead."""
        for position, window, checksum in self._order:
            parts = self._places(window) or [()]  # A rank without samples asks for a part of none.
            reached = sum(added for _, added in window)
            self._asked.append((len(window), reached, checksum, [len(part) for part in parts]))
            for part in parts:
                yield PartRequest(self._epoch, [position + at for at in part], [window[at][0] for at in part])

    def _begin(self, epoch: int) -> None:
        if self._loader.persistent_workers:
            self._entries = None  # The loader reuses its workers.
        super()._begin(epoch)
        self._asked.clear()
        self._order = self._windows_in_order(epoch)

    def _windows_in_order(self, epoch: int) -> Iterator[tuple[int, list[tuple[Any, int]], int]]:
        """Yield each window's position, its indices as `_cut` does, and a checksum of all so far.

        Leaves generators seeded.
        """
        position, checksum, windows = 0, 0, self._cut([])
        for number in count():
            seed = derive_seed(self._settings.seed, "order", epoch, number)
            seed_generators(seed)
            if number == 0:
                if self._user_loader is not None:
                    start_loader_epoch(self._user_loader, epoch, seed)
                windows = self._cut(chain.from_iterable(self._sampler))
            window = next(windows, [])
            if not window:
                return
            checksum = zlib.crc32(repr([index for index, _ in window]).encode(), checksum)
            yield position, window, checksum
            position += len(window)

    def _length(self, sample: Any) -> int:
        if self._lengths is not None:
            return int(self._lengths[sample])
        if sample not in self._measured:  # It is read with a seed of its own.
            settings, fetcher = self._settings, cast(PartFetcher, self._loader.dataset)
            with preserve_rng_state():
                seed_generators(derive_seed(settings.seed, "length", repr(sample)), fetcher.generators)
                read = self._dataset[sample]
                self._measured[sample] = settings.costs.of_sample(read, self._collate, settings.batching)
        return self._measured[sample]

    def _open(self) -> None:
        if self._entries is None:
            self._loader.generator.manual_seed(derive_seed(self._settings.seed, "workers", self._epoch))
            self._entries = Entries(self._loader)

    def _read_window(self) -> tuple[list[Any], int, int]:
        assert self._entries is not None
        parts = [self._entries.read()]
        self._has_ended = parts[0] is END and not self._asked
        if self._has_ended:
            return [], 0, 0
        samples, reached, self._checksum, sizes = self._asked.popleft()
        parts += [self._entries.read() for _ in sizes[1:]]
        if any(part is END for part in parts):
            what = f"{describe_type(self._dataset)} or its collate function"
            raise RuntimeError(f"{what} raised StopIteration, which would end the epoch early")
        pairs = zip(parts, sizes, strict=True)
        read = [self._read_collated(part, size, self._collate_others) for part, size in pairs if size]
        return read, samples, reached

    def _collate_others(self, count: int) -> Any:
        with fixed_seeds():
            return LongestBatches([*some_samples(self._dataset, count)], self._collate).collate(count)

    def _go_to(self, state: Mapping[str, Any]) -> Notice | None:
        with preserve_rng_state():
            for *_, checksum in islice(self._order, state["windows"]):
                self._checksum = checksum
        if self._checksum == state["checksum"]:
            return None
        return Notice(message("order_changed"))


def samples_to_read(workload: Workload) -> int:
    """Return how many samples are read for batches of the longest, unless `longest_of` says."""
    return TOKEN_SAMPLES if workload.counts_tokens else DEFAULT_LONGEST_OF


def start_loader_epoch(loader: DataLoader[Any], epoch: int, seed: int) -> None:
    """Pass the epoch to a loader and its samplers, and seed the generators they hold."""
    samplers = loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    seed_generators(seed, find_generators(*samplers))
    for thing in (loader, *samplers):
        set_epoch(thing, epoch)
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def _samples_per_epoch(sampler: Any) -> int | None:
    """Return the samples of an epoch for a plain batch sampler over a sampler with a length, else None."""
    if type(sampler) is not BatchSampler:
        return None
    try:
        total = len(sampler.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return total - total % sampler.batch_size if sampler.drop_last else total


def _unchanged(part: Any) -> Any:
    return part


def _on_card(card: torch.device | None) -> AbstractContextManager[Any]:
    """Make `card` the current GPU: pinned memory belongs to the current GPU's context."""
    return nullcontext() if card is None or not torch.cuda.is_available() else torch.cuda.device(card)
