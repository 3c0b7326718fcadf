"""Training data of any kind as windows.

The position in an iterable is restored by the data's own state, or by reading forward.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from autoaccum.accumulation.reachable_objects import find_generators
from autoaccum.accumulation.rng_state import derive_seed, preserve_rng_state, seed_generators
from autoaccum.accumulation.schedule import slices, split_evenly
from autoaccum.checks import describe_type, type_name
from autoaccum.devices.live_objects import make_batches
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.messages import message
from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size, join_batches, split_batch, wrap_batch
from autoaccum.sources.readings import is_samples
from autoaccum.sources.samples import LongestBatches
from autoaccum.sources.workload import Workload
from autoaccum.training.data_workers import END, Entries, set_epoch
from autoaccum.training.fit_events import Notice
from autoaccum.training.run_folder import NotPortableError, portable
from autoaccum.training.windows import DataSettings, MapStyleReader, WindowReader, samples_to_read, start_loader_epoch


class IterableReader(WindowReader):
    """Windows of an iterable of batches, or of an IterableDataset of samples.

    Each window is read with a seed from run, epoch and window. Samples are collated to the parts of a window; batches
    are joined if they have the same layout, and split where a window ends.

    Args:
        samples: The samples of an epoch; None if unknown.
        has_samples: Whether the data yields samples.

    Raises:
        UsageError: Workers are requested for samples, or `target_tokens` of batches.
    """

    def __init__(
        self, data: Any, settings: DataSettings, *, samples: int | None = None, has_samples: bool = False
    ) -> None:
        facts: dict[str, Any] = {"kind": "samples" if has_samples else "batches"}
        facts["length"] = None if samples is None else len(data)
        if isinstance(data, DataLoader):
            facts |= {"batch_size": data.batch_size, "workers": data.num_workers}
        super().__init__(settings, f"{describe_type(data)} of {facts['kind']}", samples, facts)
        if has_samples and settings.workers:
            raise UsageError(
                f"workers is {settings.workers}, but an IterableDataset divides itself among workers in its own way",
                hint="give a DataLoader over it with num_workers",
            )
        if settings.target_tokens is not None and not has_samples:
            raise UsageError(
                f"target_tokens is {settings.target_tokens}, and {self._name} has no single samples",
                hint="give target_batch (--target-batch), or a Dataset or a DataLoader over one",
            )
        self._data, self._has_samples = data, has_samples
        self._is_stateful = all(callable(getattr(data, f"{x}state_dict", None)) for x in ("", "load_"))
        self._remainder: Any = None
        self._may_reopen = False
        self._begin(0)

    def with_planning_batches(self, workload: Workload, longest_of: int | None) -> Workload:
        """Return the workload with batches of the longest of the first samples, or of the first batch.

        Raises:
            UsageError: `longest_of` is given, and batches have no single samples to compare.
        """
        if self._has_samples:
            number = longest_of or samples_to_read(workload)
            return self._with_longest(workload, self._peek(number), self._settings.collate, number)
        if longest_of is not None:
            raise UsageError(
                f"longest_of is {longest_of}, but {self._name} has no single samples to compare",
                hint="give a Dataset or a DataLoader over one, or yield the longest batch first",
            )
        batch = make_batches(self._batch(self._peek(1)[0])[0], self._settings.batching)
        return dataclasses.replace(workload, batch=batch, dataset=None)

    def _begin(self, epoch: int) -> None:
        self._remainder, self._may_reopen = None, self._is_stateful
        super()._begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the data's own state if it has one that a checkpoint can hold.

        State that the data carries from epoch to epoch, such as an order it draws, belongs to the start of the next.
        """
        data_state = None
        if self._is_stateful and (self._epoch, self._windows) != (0, 0):
            with suppress(NotPortableError):
                data_state = portable({"data": copy.deepcopy(self._data.state_dict()), "rest": self._remainder})
        return {**super().state_dict(), "own": data_state}

    def _go_to(self, state: Mapping[str, Any]) -> Notice | None:
        windows, data_state = state["windows"], state["own"]
        if data_state is not None and self._is_stateful:
            self._data.load_state_dict(data_state["data"])
            self._remainder, self._may_reopen = data_state["rest"], not windows
            return Notice(message("data_resumed"), warns=False)
        if not windows or state["ended"]:
            return None
        with preserve_rng_state():
            for number in range(windows):
                self._windows = number
                self._open()
                if not self._read_window()[1]:
                    raise UsageError(
                        f"{self._name} ends after {number:,} windows, but the run had read {windows:,}",
                        hint="use the run's original data, or another run folder",
                    )
        if self.samples_per_epoch is not None:
            return None
        return Notice(message("read_forward", windows=windows, has_state=self._is_stateful), warns=False)

    def _open(self) -> None:
        if self._entries is None:
            self._seed_epoch()
            self._entries = Entries(self._collated() if self._has_samples else self._data)
        seed_generators(derive_seed(self._settings.seed, "window", self._epoch, self._windows))

    def _seed_epoch(self) -> None:
        seed = derive_seed(self._settings.seed, "stream", self._epoch)
        data = self._data.dataset if isinstance(self._data, DataLoader) else self._data
        # What has a state of its own restores its generators itself.
        seed_generators(seed, () if self._is_stateful else find_generators(data))
        set_epoch(data, self._epoch)
        if isinstance(self._data, DataLoader):
            start_loader_epoch(self._data, self._epoch, seed)

    def _collated(self) -> Iterator[Any]:
        """Yield the parts of each window, collated from samples; by tokens, this rank's at once, as `_read_window`."""
        collate = self._settings.collate or default_collate
        for pairs in self._cut(self._data):
            window = [sample for sample, _ in pairs]
            again = LongestBatches(window, collate).collate
            if self._has_whole_windows:
                parts = [[window[at] for at in part] for part in self._places(pairs)]
                collated = [self._read_collated(collate(part), len(part), again) for part in parts]
                yield collated, len(window), sum(added for _, added in pairs)
            else:  # All ranks collate the same parts.
                for part in slices(split_evenly(len(window), self.part_size, self.multiple_of)):
                    yield self._read_collated(collate(window[part]), part.stop - part.start, again)

    @property
    def _has_whole_windows(self) -> bool:
        """Whether an entry is a whole window of this rank: of samples whose lengths count."""
        return self._has_samples and (self.micro_tokens or self._settings.target_tokens) is not None

    def _length(self, sample: Any) -> int:
        return self._settings.costs.of_sample(sample, self._settings.collate, self._settings.batching)

    def _read_window(self) -> tuple[list[Any], int, int]:
        if self._has_whole_windows:
            entry = self._next_entry()
            return ([], 0, 0) if entry is END else entry
        batches = self._read_entries()
        sizes = [batch_size(batch) for batch in batches]
        if sizes:
            self._checksum = zlib.crc32(repr(sizes).encode())
        share, parts = self._share(sum(sizes)), []
        for batch, bounds in zip(batches, slices(sizes), strict=True):
            first, last = max(share.start, bounds.start), min(share.stop, bounds.stop)
            if first < last:
                cut = [first - bounds.start, last - first, bounds.stop - last]
                parts.append(batch if cut[0] == cut[2] == 0 else split_batch(batch, cut)[1])
        return self._join_alike(parts), sum(sizes), sum(sizes)

    def _read_entries(self) -> list[Any]:
        """Read up to a window; return its batches."""
        batches, room = [], self._settings.target_batch or 1
        while room > 0:
            entry = self._next_entry() if self._remainder is None else self._remainder
            if entry is END:
                break
            batch, size = self._batch(entry)
            self._remainder = None
            if size > room:
                batch, self._remainder = split_batch(batch, [room, size - room])
            if size:
                batches.append(batch)
            room -= size
        return batches

    def _next_entry(self) -> Any:
        assert self._entries is not None
        entry = self._entries.read()
        may_reopen, self._may_reopen = self._may_reopen, False
        if entry is END and may_reopen:
            # Resumed at the end of an epoch: some iterables end once more before they start again.
            self.close()
            self._open()
            return self._next_entry()
        self._has_ended = entry is END
        return entry

    def _batch(self, entry: Any) -> tuple[Any, int]:
        try:
            batch = wrap_batch(entry, self._settings.batching)
            return batch, batch_size(batch)
        except WorkloadError as error:
            raise UsageError(
                f"{self._name} yields something that is not a batch: {error.message}",
                hint="yield batches, or give single samples as a Dataset or an IterableDataset",
            ) from error

    def _join_alike(self, parts: list[Any]) -> list[Any]:
        """Join consecutive parts of the same layout, if that makes fewer micro-batches or sizes that are multiples."""
        joined, multiple = [], self.multiple_of
        for _, run in groupby(parts, key=lambda part: _layout(part, batch_size(part))):
            alike = [*run]
            sizes = [batch_size(part) for part in alike]
            together = len(split_evenly(sum(sizes), self.part_size, multiple))
            apart = sum(len(split_evenly(size, self.part_size, multiple)) for size in sizes)
            is_packed = self.micro_tokens is not None  # The Accumulator cuts them.
            is_worth_it = is_packed or together < apart or any(size % multiple for size in sizes)
            joined += [join_batches(alike)] if alike[1:] and is_worth_it else alike
        return joined

    def _peek(self, count: int) -> list[Any]:
        """Return the first entries, which will still be read; raise UsageError if there are none."""
        state = copy.deepcopy(self._data.state_dict()) if self._is_stateful else None
        with preserve_rng_state():
            self._seed_epoch()
            reader = Entries(self._data)
            entries = list(islice(reader, count))
            reader.close(include_persistent=False)
            is_consumed = not isinstance(self._data, DataLoader) and iter(self._data) is reader.iterator
        if self._is_stateful:
            self._data.load_state_dict(state)
        elif is_consumed:
            self._data = chain(entries, self._data)
        if not entries:
            self._check_fills_window(0)
        return entries


def open_data(data: Any, settings: DataSettings) -> WindowReader:
    """Return the reader of `data`.

    Args:
        data: A map-style Dataset, or another object with `__getitem__` and `__len__` that is not a list or tuple; an
            IterableDataset of samples; a DataLoader; or any other iterable, of batches.
        settings: How to read it.

    Raises:
        UsageError: The data is none of these, or has fewer samples than a window.
    """
    if isinstance(data, DataLoader):
        samplers = data.sampler, getattr(data.batch_sampler, "sampler", None)
        if settings.ranks > 1 and any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise UsageError(
                "the DataLoader has a DistributedSampler, and fit deals the samples to the ranks itself",
                hint="give it a sampler of all samples, such as shuffle=True",
            )
        # Samples cannot be fetched without a loader that iterates in its own way.
        is_plain = type(data).__iter__ is DataLoader.__iter__ or hasattr(data, "state_dict")
        if is_plain and data.batch_sampler is not None and not isinstance(data.dataset, IterableDataset):
            return MapStyleReader(data.dataset, settings, data)
        return IterableReader(data, settings)
    if is_map_style(data):
        return MapStyleReader(data, settings)
    if isinstance(data, IterableDataset):
        return IterableReader(data, settings, has_samples=True)
    if isinstance(data, list | tuple):
        return IterableReader(data, settings, samples=_count_samples(data, settings))
    # Modules, strings and mappings are iterable but hold no batches; a class still has to be called.
    is_iterable = hasattr(data, "__iter__") or (hasattr(data, "__getitem__") and not isinstance(data, Dataset))
    if isinstance(data, str | bytes | bytearray | memoryview | type | nn.Module | Mapping) or not is_iterable:
        raise UsageError(
            f"data is {describe_type(data)}",
            hint="give a Dataset with __len__, a DataLoader, or an iterable of batches; wrap columns in a Dataset",
        )
    return IterableReader(data, settings)


def is_map_style(data: Any) -> bool:
    """Return whether `data` gives samples by index. A list or another sequence counts as batches."""
    if isinstance(data, Mapping | IterableDataset | DataLoader | nn.Module | type):
        return False
    if isinstance(data, Sequence) and not isinstance(data, Dataset | range):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


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


def _layout(node: Any, size: int) -> Any:
    """Return what batches must have in common to be joined: structure, dtypes, trailing shapes, and single values.

    What is not known to be alike equals only itself.
    """
    if isinstance(node, Tensor | np.ndarray) and node.ndim and len(node) == size:
        return id(node) if getattr(node, "requires_grad", False) else (type(node), node.dtype, tuple(node.shape[1:]))
    if pytree.is_plain(node):
        return type(node), node
    children = None if isinstance(node, pytree.CustomBatch) else pytree.children(node)
    return id(node) if children is None else (type(node), [(step, _layout(child, size)) for step, child in children])
