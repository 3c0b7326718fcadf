"""An IterableDataset's samples as windows: collated part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.training.data.counts import check_first_window, check_size
from autoaccum.training.data.pinning import current
from autoaccum.training.data.planning_batch import LOOKED_AT, longest_of
from autoaccum.training.data.reading import END, Reading
from autoaccum.training.data.stream_source import StreamSource
from autoaccum.training.data.window import Window
from autoaccum.training.data.worker_start import WorkerStart
from autoaccum.training.data.workers import handed_over
from autoaccum.training.seeds import kept_randomness, mix, seed_generators
from autoaccum.workload.batches import Batching, counted

_HANDED_OVER = 16
"""Samples that a worker hands over at once; the same whatever the part size, since it decides their order."""


class SamplesSource(StreamSource):
    """Windows of samples."""

    def __init__(
        self,
        reading: Reading,
        collate: Callable[[list[Any]], Any] | None,
        *,
        target_batch: int,
        seed: int,
        card: torch.device | None,
        batching: Batching | None = None,
    ) -> None:
        super().__init__(reading, target_batch=target_batch, unit="samples", batching=batching)
        self._collate = default_collate if collate is None else collate
        self._seed = seed
        self._card, self._pins = card, card is not None and torch.accelerator.is_available()

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """A function of a size: batches of the longest of the first samples."""
        samples = self._reading.look_ahead(worst_of or LOOKED_AT)
        if not samples:
            check_first_window(0, self._target_batch, self._reading.name)
        return longest_of(samples, self._collate, self._batching)

    def _fill(self) -> Window:
        samples: list[Any] = []
        while len(samples) < self._target_batch and (sample := self._reading.take()) is not END:
            samples.append(sample)
        return Window(samples, len(samples))

    def _made(self, window: Window) -> Window:
        kept = nullcontext() if self._collate is default_collate else kept_randomness()
        with current(self._card), kept, self.interruptible():
            parts = list(self._collated(window))
        return Window(parts, window.samples)

    def _collated(self, window: Window) -> Iterator[Any]:
        samples, place = iter(window.parts), self._reading.taken - window.samples
        for size in split_evenly(window.samples, self.part_size, self.multiple_of):
            if self._collate is not default_collate:
                seed_generators(mix(self._seed, "collate", self._epoch, place))
            part = self._collate(list(islice(samples, size)))
            held = counted(part, self._batching)
            check_size(size, held)
            yield counted(pin_memory(part), self._batching) if self._pins else held  # type: ignore[no-untyped-call]
            place += size

    def _size(self, entry: Any) -> int:
        return 1

    def _last_of(self, entry: Any, samples: int) -> Any:
        return None


class WorkerSamples:
    """Samples that workers read, in lists: each epoch has workers of its own, seeded by run and epoch."""

    def __init__(self, dataset: IterableDataset[Any], workers: int, seed: int) -> None:
        self._dataset, self._workers, self._seed = dataset, workers, seed

    def open(self, epoch: int) -> DataLoader[Any]:
        """The lists of one epoch."""
        return DataLoader(
            self._dataset,
            batch_size=_HANDED_OVER,
            num_workers=self._workers,
            collate_fn=handed_over,
            worker_init_fn=WorkerStart(None),
            generator=torch.Generator().manual_seed(mix(self._seed, "workers", epoch)),
        )
