"""Processes that read data ahead: how they start, what they make, how their failures are reported, how they end."""

from __future__ import annotations

import ctypes
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate, get_worker_info

from autoaccum.accumulation.reachable_objects import find_generators
from autoaccum.accumulation.rng_state import derive_seed, seed_generators
from autoaccum.errors import DataWorkerError

END: Final = object()
"""Returned after the last entry."""

_OPTIONS = ("num_workers", "persistent_workers", "timeout", "prefetch_factor", "multiprocessing_context")
_WORKER_FAILURE = re.compile(r"DataLoader worker \(pid|DataLoader timed out|shared memory|Too many open files")
_USER_ERROR = "in DataLoader worker process"
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


class Entries:
    """Reads `data` once, in this process or through a DataLoader's workers, which start now."""

    def __init__(self, data: Any) -> None:
        self._has_workers = isinstance(data, DataLoader) and data.num_workers > 0
        self.iterator: Iterator[Any] = iter(data)
        if getattr(self.iterator, "_worker_pids_set", False):
            # torch's SIGCHLD handler would raise the death of a worker at any moment, even within an update.
            # Reading notices it anyway.
            torch._C._remove_worker_pids(id(self.iterator))
            self.iterator._worker_pids_set = False  # type: ignore[attr-defined]

    def read(self) -> Any:
        """Return the next entry, or END.

        Raises:
            DataWorkerError: A worker died, or its shared memory or open files ran out. Errors of the data are raised
                unchanged.
        """
        try:
            return next(self.iterator, END)
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
        return iter(self.read, END)

    def close(self, *, include_persistent: bool = True) -> None:
        """End the workers at once, even in the middle of an item; by default also those kept for the next epoch."""
        if self._has_workers and (include_persistent or not getattr(self.iterator, "_persistent_workers", False)):
            for worker in getattr(self.iterator, "_workers", ()):
                worker.terminate()  # A worker of torch exits quietly on this.
            getattr(self.iterator, "_shutdown_workers", lambda: None)()


def worker_options(workers: int, loader: DataLoader[Any] | None, *, pin_memory: bool) -> dict[str, Any]:
    """Return the options of a DataLoader with so many workers, or with those of the user's `loader` if it has any."""
    options: dict[str, Any] = {"num_workers": workers}
    if loader is not None and loader.num_workers > 0:
        options = {name: getattr(loader, name) for name in _OPTIONS}
    start = partial(start_worker, None if loader is None else loader.worker_init_fn)
    pins = (pin_memory or (loader is not None and loader.pin_memory)) and torch.accelerator.is_available()
    return {**options, "worker_init_fn": start, "pin_memory": pins}


def start_worker(users_init: Callable[[int], Any] | None, worker_id: int) -> None:
    """Ignore Ctrl-C, end with the main process, then call the user's `worker_init_fn`: that of our own loaders.

    torch's workers check every few seconds whether their parent has changed since their first check. If the parent was
    killed before that, they wait forever, and so does every reader of the pipes they inherited.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.users_dataset)
    if users_init is not None:
        users_init(worker_id)


class PartRequest(NamedTuple):
    """A part of a window to be made.

    Attributes:
        epoch: The epoch, from 0.
        positions: The positions of its samples in the epoch.
        indices: Indices of its samples in the dataset.
    """

    epoch: int
    positions: Sequence[int]
    indices: Sequence[Any]


class PartFetcher:
    """A dataset for torch's DataLoader: makes a part from a request, in this process or in a worker."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self.users_dataset, self._collate, self._seed = dataset, collate, seed
        self.generators = find_generators(dataset, collate)
        self._epoch: int | None = None

    def __getitems__(self, request: PartRequest) -> Any:
        """Return the collated part."""
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            set_epoch(self.users_dataset, request.epoch)
        if not request.indices:
            return None
        if self._collate is None and type(self.users_dataset) is TensorDataset:
            return list(self.users_dataset[torch.as_tensor(request.indices)])  # As row by row; nothing is random.
        items = []
        for position, index in zip(request.positions, request.indices, strict=True):
            seed_generators(derive_seed(self._seed, "item", request.epoch, position), self.generators)
            items.append(self.users_dataset[index])
        if self._collate is None:
            return default_collate(items)
        seed_generators(derive_seed(self._seed, "collate", request.epoch, request.positions[0]), self.generators)
        return self._collate(items)


def set_epoch(thing: Any, epoch: int) -> None:
    """Pass the epoch to a sampler, a dataset or another iterable that has `set_epoch`."""
    setter = getattr(thing, "set_epoch", None)
    if callable(setter):
        setter(epoch)
