"""A map-style dataset as windows: nothing is read twice, and every item is the same however the run was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import default_collate

from autoaccum.training.data.counts import check_first_window, check_size
from autoaccum.training.data.fetching import PartFetcher, PartRequest
from autoaccum.training.data.held_parts import HeldParts
from autoaccum.training.data.indices import Order
from autoaccum.training.data.planning_batch import LOOKED_AT, longest_of_dataset
from autoaccum.training.data.regrouping import regroup
from autoaccum.training.data.sampler_generators import capture_generators, restore_generators
from autoaccum.training.data.window import Window
from autoaccum.training.data.workers import PartReader, WorkerOptions
from autoaccum.training.seeds import mix
from autoaccum.workload.batches import Batching, counted


class MapStyleSource:
    """Windows of a dataset with `__getitem__`; a `Source`.

    Its place is an epoch and a number of samples: going on skips indices and reads nothing again.

    Args:
        dataset: Asked for one item at a time.
        order: Which items, in which order.
        collate: From a list of items to a batch; None: torch's `default_collate`.
        target_batch: Samples of a window.
        seed: Of the run.
        options: How to read ahead.
        name: What the data is, for messages: `a map-style dataset`.
        batching: How batches are counted and cut; None: by their rows.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        collate: Callable[[list[Any]], Any] | None,
        *,
        target_batch: int,
        seed: int,
        options: WorkerOptions,
        name: str,
        batching: Batching | None = None,
    ) -> None:
        self.part_size, self.multiple_of = target_batch, 1
        self.interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.keeps_place = True
        self.samples_per_epoch = order.samples
        self._dataset, self._order, self._collate, self._name = dataset, order, collate, name
        self._target_batch, self._seed, self._batching = target_batch, seed, batching
        self._reader = PartReader(
            PartFetcher(dataset, collate, order.generators.values()), options, mix(seed, "workers"), order.draws
        )
        # torch's own puts every batch together anew, and what workers hand over is a copy.
        self._held = HeldParts(name, are_new=collate in (None, default_collate) or options.num_workers > 0)
        self._epoch, self._read, self._done, self._ended = 0, 0, 0, False
        self._generators = capture_generators(order.generators)
        self._is_running = self._is_restored = False
        if order.samples is not None:
            check_first_window(order.samples, target_batch, self._name)

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {"kind": "map-style", "samples": self.samples_per_epoch, "order": self._order.kind}

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """A function of a size: batches of the longest of some samples."""
        count = worst_of or LOOKED_AT
        return longest_of_dataset(self._dataset, self._order.some, self._collate, count, self._batching)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one that `restore` went to goes on where it was."""
        restored, self._is_restored = self._is_restored, False
        if restored and epoch == self._epoch:
            return
        if restored and not self._ended:
            self._run_out()
        self._epoch, self._read, self._done, self._ended = epoch, 0, 0, False
        self._generators = capture_generators(self._order.generators)
        self._is_running = False

    def start_workers(self) -> None:
        """Start those of this epoch, unless they run."""
        if not self._is_running and not self._ended:
            self._reader.start(self._requests())
            self._is_running = True

    def next_window(self) -> Window | None:
        """The next window; None when the epoch is over.

        Raises:
            UsageError: The epoch has fewer samples than a window.
            WorkloadError: `collate` makes another number of samples.
            DataWorkerError: A worker died. What the dataset raises comes through.
        """
        if self._ended:
            return None
        self.start_workers()
        with self._reader.undisturbed(), self.interruptible():
            parts, sizes = self._read_parts()
        samples = sum(sizes)
        if self._read == 0:
            check_first_window(samples, self._target_batch, self._name)
        if not samples:
            self._end()
            return None
        self._read += samples
        return Window(
            parts if self._order.makes_parts else regroup(parts, sizes, self.part_size, self.multiple_of), samples
        )

    def commit(self) -> None:
        """Move behind the last window."""
        self._done = self._read

    def state(self) -> dict[str, Any]:
        """Epoch, samples, and the sampler's own generators as they were when the epoch began (at its end: are)."""
        return {
            "epoch": self._epoch,
            "samples": self._done,
            "ended": self._ended,
            "generators": self._generators,
        }

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Go to a place; nothing is read."""
        self._epoch, self._ended = state["epoch"], state["ended"]
        self._read = self._done = state["samples"]
        self._generators = state["generators"]
        self._is_running, self._is_restored = False, True
        return "; ".join(restore_generators(self._generators, self._order.generators)) or None

    def close(self) -> None:
        """End the workers."""
        self._reader.close()

    def _requests(self) -> Iterator[PartRequest]:
        place = self._done
        part_size, each = self.part_size, self.multiple_of
        for indices in self._order.lists(self._epoch, place, self._target_batch, part_size, each):
            yield PartRequest(self._seed, self._epoch, place, indices)
            place += len(indices)

    def _read_parts(self) -> tuple[list[Any], list[int]]:
        room = self._target_batch
        sizes: list[int] = []
        self._held.begin()
        while room > 0 and (part := self._held.read(self._reader.read)) is not None:
            held = counted(part[1], self._batching)
            check_size(part[0], held)
            sizes.append(part[0])
            self._held.add(held)
            room -= part[0]
        return self._held.done(), sizes

    def _end(self) -> None:
        if self._done == self._read:
            self._ended = True
            self._generators = capture_generators(self._order.generators)

    def _run_out(self) -> None:
        """Have the sampler's own generators draw what was left of an epoch, as they would have."""
        if self._order.generators:
            for _ in self._requests():
                pass
