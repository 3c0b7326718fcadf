"""An iterable of batches as windows: a batch that crosses a window's end is cut there."""

from __future__ import annotations

from typing import Any

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.data.counts import check_first_window
from autoaccum.training.data.held_parts import HeldParts
from autoaccum.training.data.reading import END, Reading
from autoaccum.training.data.regrouping import regroup
from autoaccum.training.data.stream_source import StreamSource
from autoaccum.training.data.window import Window
from autoaccum.workload.batches import batch_size, counted, split_batch


class BatchesSource(StreamSource):
    """Windows of batches, joined where their forms allow it."""

    def __init__(self, reading: Reading, **options: Any) -> None:
        super().__init__(reading, **options)
        self._held = HeldParts(reading.name)

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """The first batch.

        Raises:
            UsageError: `worst_of` is given: of batches, no sample is looked at.
        """
        if worst_of is not None:
            raise UsageError(
                f"worst_of is {worst_of}, and {self._reading.name} gives no single samples to look at",
                hint="give a Dataset or a DataLoader over one, or begin with the longest batch",
            )
        batches = self._reading.look_ahead(1)
        if not batches:
            check_first_window(0, self._target_batch, self._reading.name)
        self._size(batches[0])
        return counted(batches[0], self._batching)

    def _fill(self) -> Window:
        self._held.begin()
        sizes: list[int] = []
        room = self._target_batch
        while room > 0:
            batch = self._held.read(self._reading.take) if self._rest is None else self._rest
            if batch is END:
                break
            batch = counted(batch, self._batching)
            size = self._size(batch)
            self._rest = None
            if size > room:
                batch, self._rest = split_batch(batch, [room, size - room])
            if size:
                self._held.add(batch)
                sizes.append(min(size, room))
                room -= sizes[-1]
        return Window(regroup(self._held.done(), sizes, self.part_size, self.multiple_of), self._target_batch - room)

    def _size(self, entry: Any) -> int:
        try:
            return batch_size(counted(entry, self._batching))
        except WorkloadError as error:
            raise UsageError(
                f"{self._reading.name} yields what is no batch: {error.message}",
                hint="yield batches, or give single samples as a Dataset or an IterableDataset",
            ) from error

    def _last_of(self, entry: Any, samples: int) -> Any:
        size = self._size(entry)
        if size < samples:
            raise UsageError(
                f"{self._reading.name} has {size} samples where the run had read more than {samples}",
                hint="give the data it began with, or another run folder",
            )
        return split_batch(counted(entry, self._batching), [size - samples, samples])[1]
