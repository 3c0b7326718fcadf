"""What a training reads from, and which kind a user's data is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autoaccum.errors import UsageError, first_line
from autoaccum.training.data.batch_lists import check_iterable, listed_batches
from autoaccum.training.data.batches_stream import BatchesSource
from autoaccum.training.data.indices import SampledOrder, ShuffledOrder
from autoaccum.training.data.map_style import MapStyleSource
from autoaccum.training.data.reading import Reading
from autoaccum.training.data.samples_stream import SamplesSource, WorkerSamples
from autoaccum.training.data.window import Window
from autoaccum.training.data.workers import WorkerOptions
from autoaccum.workload import nests
from autoaccum.workload.batches import Batching


class Source(Protocol):
    """Windows of any data, from epoch to epoch; its place can be kept and found again.

    Attributes:
        part_size: The largest part to make, in samples, where parts are made here: set before the first window.
        multiple_of: What they are multiples of, likewise; what an epoch has left over is a part of its own.
        interruptible: Entered where `next_window` waits, or runs the user's code: what is raised there at any moment
            loses nothing. Random states are put back outside of it.
        keeps_place: Whether `state` is asked for; set before the first window.
    """

    part_size: int
    multiple_of: int
    interruptible: Callable[[], AbstractContextManager[Any]]
    keeps_place: bool

    @property
    def samples_per_epoch(self) -> int | None:
        """How many samples an epoch has; None where the data does not tell."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that must be the same when a run goes on: kind, length."""

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """What to plan with: a function of a size, or one batch; nothing that is read for it is lost.

        Args:
            worst_of: Of how many samples the longest are looked for; None: of a few.

        Raises:
            UsageError: `worst_of` is given, and there are no samples to be looked at.
        """

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0; the one that `restore` went to goes on where it was."""

    def start_workers(self) -> None:
        """Start the processes that read this epoch, unless they run: where nothing is raised by a signal."""

    def next_window(self) -> Window | None:
        """The next window; None when the epoch is over."""

    def commit(self) -> None:
        """Move behind the last window: it was trained on, or passed over for good. Raises nothing."""

    def state(self) -> dict[str, Any]:
        """The place as of the last `commit`, even when more was read since; loads with `weights_only=True`."""

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Go to a place, before the first window; how it was found, as a sentence, where that is worth saying."""

    def close(self) -> None:
        """End all workers at once."""


def open_source(
    data: Any,
    *,
    target_batch: int,
    seed: int,
    workers: int,
    collate: Callable[[list[Any]], Any] | None = None,
    pin_memory: torch.device | None = None,
    batching: Batching | None = None,
) -> Source:
    """The source for `data` of any kind.

    Args:
        data: A map-style Dataset, or another object with `__getitem__` and `__len__` that is no list or tuple; an
            IterableDataset, of samples; a DataLoader; or any other iterable, of batches.
        target_batch: Samples of a window.
        seed: What order and augmentation depend on, with the epoch.
        workers: Processes that read ahead, where `data` is no DataLoader with workers of its own.
        collate: From a list of samples to a batch; a DataLoader has its own.
        batching: How batches are counted and cut; None: by their rows.
        pin_memory: The card for whose copies parts are put into pinned memory; None: they are not.

    Raises:
        UsageError: It is nothing of these, or has fewer samples than a window.
    """
    if isinstance(data, DataLoader) and is_taken_apart(data):
        return MapStyleSource(
            data.dataset,
            SampledOrder(data, seed),
            data.collate_fn,
            target_batch=target_batch,
            seed=seed,
            options=WorkerOptions.of(data, workers=workers, card=pin_memory),
            name="a DataLoader over a map-style dataset",
            batching=batching,
        )
    if is_map_style(data):
        return MapStyleSource(
            data,
            ShuffledOrder(_length(data), seed),
            collate,
            target_batch=target_batch,
            seed=seed,
            options=WorkerOptions(num_workers=workers, pin_memory=pin_memory is not None, card=pin_memory),
            name="a map-style dataset",
            batching=batching,
        )
    if isinstance(data, IterableDataset):
        lists = WorkerSamples(data, workers, seed).open if workers else None
        reading = Reading(data, f"{nests.kind(data)} of samples", seed, lists)
        options: dict[str, Any] = {"target_batch": target_batch, "seed": seed, "card": pin_memory}
        return SamplesSource(reading, collate, **options, batching=batching)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview):
        listed = data if batching is None else [batching.wrap(batch) for batch in data]
        return listed_batches(listed, target_batch=target_batch, seed=seed)
    check_iterable(data)
    reading = Reading(data, f"{nests.kind(data)} of batches", seed)
    return BatchesSource(reading, target_batch=target_batch, unit="batches", batching=batching)


def is_taken_apart(loader: DataLoader[Any]) -> bool:
    """Whether its samples can be fetched without it: not where a class of the user's own iterates in its own way."""
    gives_indices = not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    iterates_plainly = type(loader).__iter__ is DataLoader.__iter__ or hasattr(loader, "state_dict")
    return gives_indices and iterates_plainly


def is_map_style(data: Any) -> bool:
    """Whether `data` gives samples by their index; a list, or another sequence, is taken for batches."""
    if isinstance(data, Mapping | IterableDataset | DataLoader | nn.Module | type):
        return False
    if isinstance(data, Sequence) and not isinstance(data, Dataset | range):
        return False
    return hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "__getitems__"))


def _length(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{nests.kind(data)} has no length ({first_line(error)})",
            hint="define __len__, or give a DataLoader over it with a sampler",
        ) from error
