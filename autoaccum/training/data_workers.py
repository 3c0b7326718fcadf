"""Processes that read data ahead: how they start and end, and the error when one dies."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, get_worker_info

from autoaccum.errors import DataWorkerError, first_line
from autoaccum.training.data_windows import DataSettings
from autoaccum.workload import pytree

END: Final = object()
"""Returned after the last entry."""

_OPTIONS = ("num_workers", "persistent_workers", "timeout", "prefetch_factor", "multiprocessing_context")
_WORKER_FAILURE = re.compile(
    r"DataLoader worker \(pid|DataLoader timed out|shared memory|Too many open files|ancdata|file </torch"
)
_USER_ERROR = "in DataLoader worker process"
_WORKER_HINT = "most likely memory, /dev/shm or open files ran out: use fewer workers or none, or raise the limit"
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


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
            reason = _worker_failure(error) if self._has_workers else None
            if reason is None:
                raise
            raise DataWorkerError(f"a process that reads data failed ({reason})", hint=_WORKER_HINT) from error

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
    start = WorkerInit(None if loader is None else loader.worker_init_fn, options.get("multiprocessing_context"))
    return {**options, "worker_init_fn": start, "pin_memory": pins and torch.accelerator.is_available()}


def to_shared_memory(part: Any) -> Any:
    """Move a worker's part, or list of samples, to shared memory, where a failure raises an error with its reason.

    The queue would do so in a thread that prints the error, while the reader waits forever.
    """
    if get_worker_info() is not None:
        for tensor in pytree.tensors(part):
            if tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
    return part


def _worker_failure(error: Exception) -> str | None:
    """Return the line of the message that reports a failed worker or queue; None if the user's code failed."""
    text = str(error)
    if isinstance(error, RuntimeError):
        return next((line for line in text.splitlines() if _WORKER_FAILURE.search(line)), None)
    return None if _USER_ERROR in text else first_line(error) or type(error).__name__


class WorkerInit:
    """The `worker_init_fn` of our own loaders: ignore Ctrl-C, end with the main process, then call the user's function.

    torch's workers check every few seconds whether their parent has changed since their first check. If the parent was
    killed before that, they wait forever, and so does every reader of the pipes they inherited.

    Args:
        users: The user's own `worker_init_fn`.
        context: How workers are started: a multiprocessing context or its name; None: the default.
    """

    def __init__(self, users: Callable[[int], Any] | None, context: Any = None) -> None:
        self._users = users
        method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
        # A fork server is the parent of its workers, and ends with the main process.
        self._parent = None if method == "forkserver" else os.getpid()

    def __call__(self, worker_id: int) -> None:
        """Initialise the worker with this number."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._parent is not None:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
        info: Any = get_worker_info()
        if hasattr(info.dataset, "users_dataset"):
            object.__setattr__(info, "dataset", info.dataset.users_dataset)
        if self._users is not None:
            self._users(worker_id)
