"""Windows, the samples of one update each: the base class of their sources, and the processes that read ahead."""

from __future__ import annotations

import abc
import ctypes
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from autoaccum.accumulation.reachable_objects import find_generators
from autoaccum.accumulation.rng_state import seed_generators
from autoaccum.accumulation.schedule import even_parts, slices, split_evenly
from autoaccum.errors import DataWorkerError, UsageError, WorkloadError
from autoaccum.sources import pytree
from autoaccum.sources.batches import BatchReader, batch_size, join_batches, read_batch
from autoaccum.sources.readings import is_samples
from autoaccum.sources.samples import LongestBatches, longest_first

END: Final = object()
"""Returned after the last entry."""

_OPTIONS = ("num_workers", "persistent_workers", "timeout", "prefetch_factor", "multiprocessing_context")
_WORKER_FAILURE = re.compile(r"DataLoader worker \(pid|DataLoader timed out|shared memory|Too many open files")
_USER_ERROR = "in DataLoader worker process"
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings for reading data of any kind.

    Attributes:
        target_batch: Samples of a window.
        seed: The seed of order and augmentation, together with the epoch.
        workers: Processes that read ahead, unless the data is a DataLoader with its own workers.
        collate: Builds a batch from a list of samples; None: torch's `default_collate`. A DataLoader has its own.
        batching: How batches are counted and split; None: by rows.
        card: The GPU for which parts are put into pinned memory; None: no pinned memory.
        rank: The number of this rank, whose share of each window is read.
        ranks: The number of ranks.
    """

    target_batch: int
    seed: int
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    batching: BatchReader = None
    card: torch.device | None = None
    rank: int = 0
    ranks: int = 1


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


class WindowSource(abc.ABC):
    """Windows of data, epoch after epoch, from a position that can be saved and restored.

    Args:
        name: A description of the data for messages: `a map-style dataset`.

    Attributes:
        part_size: The largest part to make, in samples. Set this and the following before the first window.
        multiple_of: Part sizes are multiples of this; what is left over in an epoch is a part of its own.
        interruptible: Context in which `next_window` waits or runs the user's code, and may be interrupted at any
            moment without loss. Random states are restored outside of it.
        saves_position: False if `state_dict` will never be called.
        samples_per_epoch: Samples of an epoch; None if the data has no known length.
    """

    def __init__(self, settings: DataSettings, name: str) -> None:
        self.part_size, self.multiple_of = settings.target_batch, 1
        self.interruptible: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.saves_position = True
        self.samples_per_epoch: int | None = None
        self._settings, self._name = settings, name
        self._epoch, self._is_restored = 0, False

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch, counted from 0. An epoch restored by `load_state_dict` continues from its position."""
        restored, self._is_restored = self._is_restored, False
        if not (restored and epoch == self._epoch):
            self._begin(epoch)

    @abc.abstractmethod
    def planning_batch(self, worst_of: int | None = None) -> Any:
        """Return a batch, or a function of the size that makes batches of the longest of `worst_of` samples."""

    @abc.abstractmethod
    def _begin(self, epoch: int) -> None:
        """Go to the start of an epoch."""

    def _share(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield this rank's share of a window that consists of lists of `sizes`: a list's number, and where it is cut.

        Shares are consecutive, differ by at most `multiple_of`, and the last rank has what makes no multiple.
        """
        whole, left = divmod(sum(sizes), self.multiple_of)
        shares = [share * self.multiple_of for share in even_parts(whole, self._settings.ranks)]
        shares[-1] += left
        own = slices(shares)[self._settings.rank]
        for number, entries in enumerate(slices(sizes)):
            first, last = max(own.start, entries.start), min(own.stop, entries.stop)
            if first < last:
                yield number, first - entries.start, last - entries.start

    def _check_fills_window(self, samples: int, epoch: int = 0) -> None:
        """Raise UsageError for an epoch smaller than a window: no smaller batch than requested is trained silently."""
        if samples == 0 and epoch > 0:
            raise UsageError(
                f"{self._name} yields nothing in epoch {epoch + 1}: it can be iterated only once",
                hint="give data that starts again each time (a list, a DataLoader, an object with __iter__), or use"
                " fewer epochs",
            )
        if samples == 0:
            raise UsageError(f"{self._name} has no samples", hint="give data with at least one window of samples")
        if samples < self._settings.target_batch:
            raise UsageError(
                f"{self._name} has {samples:,} samples, fewer than the target batch of {self._settings.target_batch:,}",
                hint=f"use --target-batch {samples} or less (target_batch in code), or give more data",
            )

    def _check_collated(self, part: Any, size: int) -> Any:
        """Return a collated part with the workload's way of counting.

        Raises:
            WorkloadError: `collate` returned more or fewer samples than it was given.
        """
        again = lambda count: self.planning_batch(count).collate(count)  # noqa: E731
        return read_batch(part, self._settings.batching, size, "collate()", again)

    def _longest(self, samples: list[Any], collate: Callable[[list[Any]], Any] | None) -> LongestBatches:
        """Return batches of `samples`, the longest first; in the given order if nothing in them has a length."""
        with suppress(WorkloadError):
            samples = longest_first(samples, len(samples), collate)
        return LongestBatches(samples, collate, self._settings.batching)

    def _join_alike(self, parts: list[Any], sizes: list[int]) -> list[Any]:
        """Join consecutive parts of the same layout, if that makes fewer micro-batches or sizes that are multiples.

        Differently padded parts stay separate.
        """
        joined = []
        for _, run in groupby(zip(parts, sizes, strict=True), key=lambda sized: _layout(*sized, top=True)):
            alike, of_sizes = zip(*run, strict=True)
            joined += self._join([*alike], [*of_sizes])
        return joined

    def _join(self, parts: list[Any], sizes: list[int]) -> list[Any]:
        multiple, total = self.multiple_of, sum(sizes)
        together = len(split_evenly(total, self.part_size, multiple))
        apart = sum(len(split_evenly(size, self.part_size, multiple)) for size in sizes)
        if len(parts) == 1 or (together == apart and not any(size % multiple for size in sizes)):
            return parts  # Joining would be a useless copy.
        joined = join_batches(parts)
        # A list can be read in several ways, depending on its length.
        return [joined] if batch_size(joined) == total else parts


def set_epoch(thing: Any, epoch: int) -> None:
    """Pass the epoch to a sampler, a dataset or another iterable that has `set_epoch`."""
    setter = getattr(thing, "set_epoch", None)
    if callable(setter):
        setter(epoch)


def start_loader_epoch(loader: DataLoader[Any], epoch: int, seed: int, sampler: Any = None) -> None:
    """Pass the epoch to a loader and its samplers, `sampler` in place of its own, and seed the generators they hold."""
    first = loader.batch_sampler if sampler is None else sampler
    samplers = first, loader.sampler, getattr(first, "sampler", None)
    seed_generators(seed, find_generators(*samplers))
    for thing in (loader, *samplers):
        set_epoch(thing, epoch)
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def _layout(node: Any, size: int, *, top: bool = False) -> Any:
    """Return what batches must have in common to be joined: structure, types, dtypes, trailing shapes, single values.

    A batch that the workload splits itself, a tensor that requires a gradient, and an unknown object equal only
    themselves.
    """
    if isinstance(node, pytree.CustomBatch) or getattr(node, "requires_grad", False):
        return id(node)
    if pytree.is_leaf(node):
        place = node.device if isinstance(node, Tensor) else "numpy"
        if pytree.has_batch_dimension(node) and len(node) == size:
            return type(node), place, node.dtype, tuple(node.shape[1:])
        return type(node), place, node.dtype, str(node.tolist())
    children = pytree.children(node)
    if children is None:
        return (type(node), node) if pytree.is_plain(node) else id(node)
    if pytree.is_sequence(node) and is_samples(node, size, top=top):
        return type(node), "samples", frozenset(map(type, node))
    return type(node), [(step, _layout(child, size)) for step, child in children]


class Reader:
    """Reads `data` once, in this process or through a DataLoader's workers, which start now."""

    def __init__(self, data: Any) -> None:
        self._has_workers = isinstance(data, DataLoader) and data.num_workers > 0
        self.entries: Iterator[Any] = iter(data)
        if getattr(self.entries, "_worker_pids_set", False):
            # torch's SIGCHLD handler would raise the death of a worker at any moment, even within an update.
            # Reading notices it anyway.
            torch._C._remove_worker_pids(id(self.entries))
            self.entries._worker_pids_set = False  # type: ignore[attr-defined]

    def read(self) -> Any:
        """Return the next entry, or END.

        Raises:
            DataWorkerError: A worker died, or its shared memory or open files ran out. Errors of the data are raised
                unchanged.
        """
        try:
            return next(self.entries, END)
        except (RuntimeError, OSError, EOFError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = next((line for line in lines if _WORKER_FAILURE.search(line)), None)
            if not isinstance(error, RuntimeError) and _USER_ERROR not in str(error):
                reason = lines[0]  # The connection to a worker has ended.
            if reason is None or not self._has_workers:
                raise
            raise DataWorkerError(
                f"a process that reads data failed ({reason})",
                hint="memory, /dev/shm or open files may have run out: use fewer workers, or raise the limit",
            ) from error

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the remaining entries."""
        while (entry := self.read()) is not END:
            yield entry

    def close(self, *, include_persistent: bool = True) -> None:
        """End the workers at once, even in the middle of an item; by default also those kept for the next epoch."""
        if self._has_workers and (include_persistent or not getattr(self.entries, "_persistent_workers", False)):
            for worker in getattr(self.entries, "_workers", ()):
                worker.terminate()  # A worker of torch exits quietly on this.
            getattr(self.entries, "_shutdown_workers", lambda: None)()


def worker_options(settings: DataSettings, loader: DataLoader[Any] | None = None) -> dict[str, Any]:
    """Return the options of our own DataLoader: those of the user's, if that has workers."""
    pins = settings.card is not None or (loader is not None and loader.pin_memory)
    options: dict[str, Any] = {"num_workers": settings.workers}
    if loader is not None and loader.num_workers > 0:
        options = {name: getattr(loader, name) for name in _OPTIONS}
    start = WorkerInit(None if loader is None else loader.worker_init_fn)
    return {**options, "worker_init_fn": start, "pin_memory": pins and torch.accelerator.is_available()}


class WorkerInit:
    """The `worker_init_fn` of our own loaders: ignore Ctrl-C, end with the main process, then call the user's function.

    torch's workers check every few seconds whether their parent has changed since their first check. If the parent was
    killed before that, they wait forever, and so does every reader of the pipes they inherited.

    Args:
        users: The user's own `worker_init_fn`.
    """

    def __init__(self, users: Callable[[int], Any] | None) -> None:
        self._users = users

    def __call__(self, worker_id: int) -> None:
        """Initialise the worker with this number."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        info: Any = get_worker_info()
        if hasattr(info.dataset, "users_dataset"):
            object.__setattr__(info, "dataset", info.dataset.users_dataset)
        if self._users is not None:
            self._users(worker_id)
