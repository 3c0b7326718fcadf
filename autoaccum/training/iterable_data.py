"""What can only be gone through, as windows: its place is kept by its own state, or found by reading forward."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, default_collate

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.checks import describe_type
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.plan_request import DEFAULT_WORST_OF
from autoaccum.training.checkpoints import NotPortableError, portable
from autoaccum.training.data_windows import DataSettings, Window, WindowSource, set_epoch, start_loader_epoch
from autoaccum.training.data_workers import END, Reader
from autoaccum.training.seeds import derive_seed, item_seed, preserve_rng_state, seed_generators
from autoaccum.workload.batches import batch_size, split_batch, wrap_batch


class StreamSource(WindowSource):
    """Windows of an iterable, each read under seeds of run, epoch and window.

    Args:
        data: The iterable.
        settings: What it is read by.
        unit: What it yields: `batches`.
        length: How many of them it has; None where it does not tell.
    """

    def __init__(self, data: Any, settings: DataSettings, unit: str, length: int | None = None) -> None:
        name = f"{describe_type(data)} of {unit}" if length is None else f"{describe_type(data)} of {length:,} {unit}"
        super().__init__(settings, name)
        self._data, self._unit, self._length = data, unit, length
        self._is_stateful = all(callable(getattr(data, f"{x}state_dict", None)) for x in ("", "load_"))
        self._reader: Reader | None = None
        self._rest: Any = None
        self._place: dict[str, Any] = {}
        self._committed = self._place
        self._begin(0)

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        found: dict[str, Any] = {"kind": self._unit, "length": self._length}
        if isinstance(self._data, DataLoader):
            found |= {"batch_size": self._data.batch_size, "workers": self._data.num_workers}
        return found

    def next_window(self) -> Window | None:
        """The next window; None when the epoch is over."""
        if self._ended:
            return None
        with preserve_rng_state():
            self._prepare()  # Outside of `interruptible`: processes are not left half started.
            with self.interruptible():
                entries, sizes = self._fill()
                parts = self._made(entries, sizes)
        samples = sum(sizes)
        if self._windows == 0:
            self._check_first(samples, self._epoch)
        is_committed = self._committed is self._place
        self._windows += bool(samples)
        self._place = self._here()
        if not samples and is_committed:
            self.commit()
        return Window(parts, samples) if samples else None

    def commit(self) -> None:
        """Move behind the last window."""
        self._committed = self._place

    def state_dict(self) -> dict[str, Any]:
        """The place; without the data's own state where a checkpoint cannot hold that, or the rest of an entry."""
        try:
            return {**self._committed, "own": portable(self._committed["own"])}
        except NotPortableError:
            return {**self._committed, "own": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go to a place, by the data's own state or by reading forward; says which.

        Raises:
            UsageError: The data ends before it.
        """
        self._begin(state["epoch"])
        self._is_restored = True
        windows, own, told = state["windows"], state["own"], None
        if own is not None and self._is_stateful:
            self._data.load_state_dict(own["data"])
            self._rest, self._may_reopen = own["rest"], not windows
            told = "the data went on by its own state_dict"
        elif windows and not state["ended"]:
            self._read_forward(windows)
            why = "its state_dict could not be kept" if self._is_stateful else "the data has no state_dict"
            told = None if self._length is not None else f"{why}: {windows:,} windows were read forward"
        self._windows, self._ended = windows, state["ended"]
        self._place = self._committed = dict(state)
        return told

    def close(self) -> None:
        """End the workers; those that a loader of the user's keeps from epoch to epoch stay."""
        if self._reader is not None:
            self._reader.close(also_kept=False)
            self._reader = None

    @abc.abstractmethod
    def _fill(self) -> tuple[list[Any], list[int]]:
        """Read up to a window: entries, and the samples of each."""

    @abc.abstractmethod
    def _made(self, entries: list[Any], sizes: list[int]) -> list[Any]:
        """The parts of a window."""

    def _begin(self, epoch: int) -> None:
        self.close()
        self._epoch, self._windows, self._ended = epoch, 0, False
        self._rest = None
        self._may_reopen = self._is_stateful
        # What the data keeps from epoch to epoch, as an order it draws by itself, belongs to where this one begins.
        self._place = self._committed = self._here(keeps=epoch > 0)

    def _here(self, *, keeps: bool = True) -> dict[str, Any]:
        keeps = keeps and self.saves_position and self._is_stateful
        own = {"data": copy.deepcopy(self._data.state_dict()), "rest": self._rest} if keeps else None
        return {"epoch": self._epoch, "windows": self._windows, "ended": self._ended, "own": own}

    def _prepare(self) -> None:
        """Open the data, unless it is open, and seed for the next window."""
        if self._reader is None:
            self._reader = self._open()
        seed_generators(derive_seed(self._settings.seed, "window", self._epoch, self._windows))

    def _open(self) -> Reader:
        seed = derive_seed(self._settings.seed, "stream", self._epoch)
        seed_generators(seed)
        if isinstance(self._data, DataLoader):
            set_epoch(self._data.dataset, self._epoch)
            start_loader_epoch(self._data, self._epoch, seed)
        else:
            set_epoch(self._data, self._epoch)
        return Reader(self._data)

    def _take(self) -> Any:
        assert self._reader is not None
        entry = self._reader.read()
        may_reopen, self._may_reopen = self._may_reopen, False
        if entry is END and may_reopen:
            # A state from the end of an epoch: some iterate from there once, and start anew after.
            self.close()
            self._prepare()
            return self._take()
        self._ended = entry is END
        return entry

    def _read_forward(self, windows: int) -> None:
        with preserve_rng_state():
            for number in range(windows):
                self._windows = number
                self._prepare()
                if not sum(self._fill()[1]):
                    raise UsageError(
                        f"{self._name} ends after {number:,} windows, and the run had read {windows:,}",
                        hint="give the data it began with, or another run folder",
                    )

    def _look_ahead(self, count: int) -> list[Any]:
        """The first entries, which stay to be read.

        Raises:
            UsageError: There are none.
        """
        state = copy.deepcopy(self._data.state_dict()) if self._is_stateful else None
        with preserve_rng_state():
            reader = self._open()
            looked = list(islice(reader, count))
            reader.close(also_kept=False)
            goes_on = not isinstance(self._data, DataLoader) and iter(self._data) is reader.entries
        if self._is_stateful:
            self._data.load_state_dict(state)
        elif goes_on:
            self._data = chain(looked, self._data)
        if not looked:
            self._check_first(0)
        return looked


class SamplesSource(StreamSource):
    """Windows of the samples of an IterableDataset, collated part by part.

    Raises:
        UsageError: Workers are to read it.
    """

    def __init__(self, data: Any, settings: DataSettings) -> None:
        if settings.workers:
            raise UsageError(
                f"workers is {settings.workers}, and an IterableDataset shares itself out in a way of its own",
                hint="give a DataLoader over it, with num_workers",
            )
        super().__init__(data, settings, "samples")
        self._collate = default_collate if settings.collate is None else settings.collate
        self._waiting: list[Any] = []

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """A function of a size: batches of the longest of the first samples."""
        return self._longest(self._look_ahead(worst_of or DEFAULT_WORST_OF), self._settings.collate)

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._waiting = []

    def _fill(self) -> tuple[list[Any], list[int]]:
        target, samples = self._settings.target_batch, self._waiting
        while len(samples) < target and (entry := self._take()) is not END:
            samples = [*samples, entry]
        self._waiting = samples[target:]
        return samples[:target], [1] * len(samples[:target])

    def _made(self, entries: list[Any], sizes: list[int]) -> list[Any]:
        parts, following = [], iter(entries)
        base, place = derive_seed(self._settings.seed, "collate", self._epoch, self._windows), 0
        for size in split_evenly(len(entries), self.part_size, self.multiple_of) if entries else ():
            seed_generators(item_seed(base, place))
            parts.append(self._counted(self._collate(list(islice(following, size))), size))
            place += size
        return parts


class BatchesSource(StreamSource):
    """Windows of an iterable of batches: joined where their forms allow it, and cut where a window ends."""

    def __init__(self, data: Any, settings: DataSettings, samples: int | None = None) -> None:
        super().__init__(data, settings, "batches", None if samples is None else len(data))
        self.samples_per_epoch = samples

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """The first batch.

        Raises:
            UsageError: `worst_of` is given: of batches, no sample is looked at.
        """
        if worst_of is not None:
            raise UsageError(
                f"worst_of is {worst_of}, and {self._name} gives no single samples to look at",
                hint="give a Dataset or a DataLoader over one, or begin with the longest batch",
            )
        return self._batch(self._look_ahead(1)[0])[0]

    def _fill(self) -> tuple[list[Any], list[int]]:
        parts, sizes, room = [], list[int](), self._settings.target_batch
        while room > 0:
            entry = self._take() if self._rest is None else self._rest
            if entry is END:
                break
            batch, size = self._batch(entry)
            self._rest = None
            if size > room:
                batch, self._rest = split_batch(batch, [room, size - room])
            if size:
                parts.append(batch)
                sizes.append(min(size, room))
                room -= sizes[-1]
        return parts, sizes

    def _made(self, entries: list[Any], sizes: list[int]) -> list[Any]:
        return self._joined(entries, sizes)

    def _batch(self, entry: Any) -> tuple[Any, int]:
        try:
            batch = wrap_batch(entry, self._settings.batching)
            return batch, batch_size(batch)
        except WorkloadError as error:
            raise UsageError(
                f"{self._name} yields what is no batch: {error.message}",
                hint="yield batches, or give single samples as a Dataset or an IterableDataset",
            ) from error
