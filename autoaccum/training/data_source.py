"""Training data as a source of windows: what is data and what is not, and windows of iterables.

The position in an iterable is restored by the data's own state, or by reading forward.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from autoaccum.accumulation.reachable_objects import find_generators
from autoaccum.accumulation.rng_state import derive_seed, preserve_rng_state, seed_generators
from autoaccum.accumulation.schedule import slices, split_evenly
from autoaccum.checks import describe_type, type_name
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.plan_request import DEFAULT_WORST_OF
from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size, split_batch, wrap_batch
from autoaccum.sources.readings import is_samples
from autoaccum.training.checkpoints import NotPortableError, portable
from autoaccum.training.data_windows import (
    END,
    DataSettings,
    Reader,
    Window,
    WindowSource,
    set_epoch,
    start_loader_epoch,
)
from autoaccum.training.fit_events import Notice
from autoaccum.training.map_style_data import MapStyleSource

_DATA_HINT = "give a Dataset, a DataLoader, or an iterable of batches"


class BatchesSource(WindowSource):
    """Windows of an iterable of batches, each read with a seed from run, epoch and window.

    Batches are joined if they have the same layout, and split where a window ends.

    Args:
        samples: The samples of an epoch; None if unknown.
    """

    unit = "batches"

    def __init__(self, data: Any, settings: DataSettings, samples: int | None = None) -> None:
        super().__init__(settings, f"{describe_type(data)} of {self.unit}")
        self.samples_per_epoch, self._length = samples, None if samples is None else len(data)
        self._data = data
        self._is_stateful = all(callable(getattr(data, f"{x}state_dict", None)) for x in ("", "load_"))
        self._reader: Reader | None = None
        self._remainder: Any = None
        self._position: dict[str, Any] = {}
        self._committed = self._position
        self._begin(0)

    def fingerprint(self) -> dict[str, Any]:
        """Return what must be equal on resuming."""
        found: dict[str, Any] = {"kind": self.unit, "length": self._length}
        if isinstance(self._data, DataLoader):
            found |= {"batch_size": self._data.batch_size, "workers": self._data.num_workers}
        return found

    def next_window(self) -> Window | None:
        """Return the next window, or None at the end of the epoch."""
        if self._ended:
            return None
        with preserve_rng_state():
            self._open_and_seed()  # Outside of `interruptible`, so that no process is left half started.
            with self.interruptible():
                entries, sizes = self._read_entries()
                parts = self._join_alike(*self._own(entries, sizes))
        samples, checksum = sum(sizes), zlib.crc32(repr(sizes).encode())
        if self._windows == 0:
            self._check_fills_window(samples, self._epoch)
        is_committed = self._committed is self._position
        self._windows += bool(samples)
        self._position = self._current_position()
        if not samples and is_committed:
            self.commit()
        return Window(parts, samples, checksum) if samples else None

    def commit(self) -> None:
        """Move the position past the last window."""
        self._committed = self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the data's own state if a checkpoint can hold it."""
        try:
            return {**self._committed, "own": portable(self._committed["own"])}
        except NotPortableError:
            return {**self._committed, "own": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> Notice | None:
        """Go to a position, by the data's own state or by reading forward; return a note about which.

        Raises:
            UsageError: The data ends before it.
        """
        self._begin(state["epoch"])
        self._is_restored = True
        windows, own, note = state["windows"], state["own"], None
        if own is not None and self._is_stateful:
            self._data.load_state_dict(own["data"])
            self._remainder, self._may_reopen = own["rest"], not windows
            note = "the data resumed from its own state_dict"
        elif windows and not state["ended"]:
            self._skip_windows(windows)
            why = "its state_dict could not be saved" if self._is_stateful else "the data has no state_dict"
            note = None if self._length is not None else f"{why}: {windows:,} windows were read forward"
        self._windows, self._ended = windows, state["ended"]
        self._position = self._committed = dict(state)
        return None if note is None else Notice(note, warns=False)

    def close(self) -> None:
        """End the workers, except those that the user's loader keeps from epoch to epoch."""
        if self._reader is not None:
            self._reader.close(include_persistent=False)
            self._reader = None

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """Return the first batch; raise UsageError for `worst_of`, since batches have no single samples to compare."""
        if worst_of is not None:
            raise UsageError(
                f"worst_of is {worst_of}, but {self._name} has no single samples to compare",
                hint="give a Dataset or a DataLoader over one, or yield the longest batch first",
            )
        return self._batch(self._peek(1)[0])[0]

    def _read_entries(self) -> tuple[list[Any], list[int]]:
        """Read up to a window; return the batches and the samples of each."""
        parts, sizes, room = [], list[int](), self._settings.target_batch
        while room > 0:
            entry = self._next_entry() if self._remainder is None else self._remainder
            if entry is END:
                break
            batch, size = self._batch(entry)
            self._remainder = None
            if size > room:
                batch, self._remainder = split_batch(batch, [room, size - room])
            if size:
                parts.append(batch)
                sizes.append(min(size, room))
                room -= sizes[-1]
        return parts, sizes

    def _batch(self, entry: Any) -> tuple[Any, int]:
        try:
            batch = wrap_batch(entry, self._settings.batching)
            return batch, batch_size(batch)
        except WorkloadError as error:
            raise UsageError(
                f"{self._name} yields something that is not a batch: {error.message}",
                hint="yield batches, or give single samples as a Dataset or an IterableDataset",
            ) from error

    def _own(self, entries: Sequence[Any], sizes: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Return this rank's batches of a window, and their sizes."""
        own, own_sizes = list[Any](), list[int]()
        for number, first, last in self._share(sizes):
            cut = [first, last - first, sizes[number] - last]
            own.append(entries[number] if cut[1] == sizes[number] else split_batch(entries[number], cut)[1])
            own_sizes.append(cut[1])
        return own, own_sizes

    def _begin(self, epoch: int) -> None:
        self.close()
        self._epoch, self._windows, self._ended = epoch, 0, False
        self._remainder = None
        self._may_reopen = self._is_stateful
        # State that the data carries from epoch to epoch, such as an order it draws, belongs to the start of this one.
        self._position = self._committed = self._current_position(with_state=epoch > 0)

    def _current_position(self, *, with_state: bool = True) -> dict[str, Any]:
        with_state = with_state and self.saves_position and self._is_stateful
        own = {"data": copy.deepcopy(self._data.state_dict()), "rest": self._remainder} if with_state else None
        return {"epoch": self._epoch, "windows": self._windows, "ended": self._ended, "own": own}

    def _open_and_seed(self) -> None:
        """Open the data if necessary, and seed for the next window."""
        if self._reader is None:
            self._seed_epoch()
            self._reader = Reader(self._iterable())
        seed_generators(derive_seed(self._settings.seed, "window", self._epoch, self._windows))

    def _seed_epoch(self) -> None:
        seed = derive_seed(self._settings.seed, "stream", self._epoch)
        data = self._data.dataset if isinstance(self._data, DataLoader) else self._data
        # What has a state of its own restores its generators itself.
        seed_generators(seed, () if self._is_stateful else find_generators(data))
        set_epoch(data, self._epoch)
        if isinstance(self._data, DataLoader):
            start_loader_epoch(self._data, self._epoch, seed)

    def _iterable(self) -> Any:
        return self._data

    def _next_entry(self) -> Any:
        assert self._reader is not None
        entry = self._reader.read()
        may_reopen, self._may_reopen = self._may_reopen, False
        if entry is END and may_reopen:
            # Resumed at the end of an epoch: some iterables end once more before they start again.
            self.close()
            self._open_and_seed()
            return self._next_entry()
        self._ended = entry is END
        return entry

    def _skip_windows(self, windows: int) -> None:
        with preserve_rng_state():
            for number in range(windows):
                self._windows = number
                self._open_and_seed()
                if not sum(self._read_entries()[1]):
                    raise UsageError(
                        f"{self._name} ends after {number:,} windows, but the run had read {windows:,}",
                        hint="use the run's original data, or another run folder",
                    )

    def _peek(self, count: int) -> list[Any]:
        """Return the first entries, which will still be read; raise UsageError if there are none."""
        state = copy.deepcopy(self._data.state_dict()) if self._is_stateful else None
        with preserve_rng_state():
            self._seed_epoch()
            reader = Reader(self._data)
            entries = list(islice(reader, count))
            reader.close(include_persistent=False)
            is_consumed = not isinstance(self._data, DataLoader) and iter(self._data) is reader.entries
        if self._is_stateful:
            self._data.load_state_dict(state)
        elif is_consumed:
            self._data = chain(entries, self._data)
        if not entries:
            self._check_fills_window(0)
        return entries


class SamplesSource(BatchesSource):
    """Windows of an IterableDataset, whose samples are collated to the parts of a window.

    Raises:
        UsageError: Workers are requested.
    """

    unit = "samples"

    def __init__(self, data: Any, settings: DataSettings) -> None:
        if settings.workers:
            raise UsageError(
                f"workers is {settings.workers}, but an IterableDataset divides itself among workers in its own way",
                hint="give a DataLoader over it with num_workers",
            )
        super().__init__(data, settings)

    def planning_batch(self, worst_of: int | None = None) -> Any:
        """Return a function of the size that makes batches of the longest among the first samples."""
        return self._longest(self._peek(worst_of or DEFAULT_WORST_OF), self._settings.collate)

    def _iterable(self) -> Iterator[Any]:
        samples, collate = iter(self._data), self._settings.collate or default_collate
        while window := list(islice(samples, self._settings.target_batch)):
            for part in slices(split_evenly(len(window), self.part_size, self.multiple_of)):
                yield self._check_collated(collate(window[part]), part.stop - part.start)


Source: TypeAlias = MapStyleSource | SamplesSource | BatchesSource


def open_source(data: Any, settings: DataSettings) -> Source:
    """Return the source of windows for `data`.

    Args:
        data: A map-style Dataset, or another object with `__getitem__` and `__len__` that is not a list or tuple; an
            IterableDataset of samples; a DataLoader; or any other iterable, of batches.
        settings: How to read it.

    Raises:
        UsageError: The data is none of these, or has fewer samples than a window.
    """
    if settings.ranks > 1 and isinstance(data, DataLoader):
        _check_undivided(data)
    if isinstance(data, DataLoader) and can_fetch_samples(data):
        return MapStyleSource(data.dataset, settings, data)
    if is_map_style(data):
        return MapStyleSource(data, settings)
    if isinstance(data, IterableDataset):
        return SamplesSource(data, settings)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview):
        return BatchesSource(data, settings, _count_samples(data, settings))
    _check_iterable(data)
    return BatchesSource(data, settings)


def _check_undivided(loader: DataLoader[Any]) -> None:
    """Raise UsageError if the loader itself leaves out the samples of other ranks."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise UsageError(
                f"the DataLoader has a {type_name(sampler)}, and fit deals the samples to the ranks itself",
                hint="give it a sampler of all samples, such as shuffle=True",
            )


def can_fetch_samples(loader: DataLoader[Any]) -> bool:
    """Return whether samples can be fetched without the loader: not if a subclass iterates in its own way."""
    gives_indices = not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    iterates_plainly = type(loader).__iter__ is DataLoader.__iter__ or hasattr(loader, "state_dict")
    return gives_indices and iterates_plainly


def is_map_style(data: Any) -> bool:
    """Return whether `data` gives samples by index. A list or another sequence counts as batches."""
    if isinstance(data, Mapping | IterableDataset | DataLoader | nn.Module | type):
        return False
    if isinstance(data, Sequence) and not isinstance(data, Dataset | range):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _check_iterable(data: Any) -> None:
    if isinstance(data, Mapping):
        raise UsageError(f"data is {describe_type(data)}", hint=f"wrap tensors by column in a Dataset, or {_DATA_HINT}")
    if isinstance(data, Dataset) and not hasattr(type(data), "__iter__"):
        raise UsageError(f"{describe_type(data)} has no length", hint="define __len__, or give a DataLoader of it")
    # Modules and strings are iterable but hold no batches; a class still has to be called.
    is_iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, str | bytes | type | nn.Module) or not is_iterable:
        raise UsageError(f"data is {describe_type(data)}", hint=_DATA_HINT)


def _count_samples(data: Sequence[Any], settings: DataSettings) -> int:
    """Count the samples of a list of batches; raise UsageError if it is empty, or looks like something else."""
    if not data:
        raise UsageError(f"data is an empty {type_name(data)}", hint="give at least one batch")
    try:
        sizes = [batch_size(wrap_batch(entry, settings.batching)) for entry in data]
        reason = _single_value(wrap_batch(data[0], settings.batching), sizes[0], "data[0]", top=True)
    except WorkloadError as error:
        reason = error.message
    if reason is not None:
        raise UsageError(
            f"data is {describe_type(data)} whose entries are no batches ({reason})",
            hint="a list must hold batches; wrap samples in a Dataset (def __getitem__, def __len__)",
        )
    return sum(sizes)


def _single_value(node: Any, size: int, path: str, *, top: bool = False) -> str | None:
    """Describe a number or a tensor without dimensions that belongs to no sample; None if there is none."""
    if isinstance(node, bool | int | float | complex):
        return f"{path} is {describe_type(node)}"
    if isinstance(node, pytree.CustomBatch) or is_samples(node, size, top=top):
        return None
    if pytree.is_leaf(node):
        return None if pytree.has_batch_dimension(node) else f"{path} is {describe_type(node)} without dimensions"
    reasons = (_single_value(child, size, path + step) for step, child in pytree.children(node) or ())
    return next((reason for reason in reasons if reason is not None), None)
