"""Processes that read data ahead: how they start and end, and what is told when one dies."""

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
"""What is read behind the last entry."""

_OPTIONS = ("num_workers", "persistent_workers", "timeout", "prefetch_factor", "multiprocessing_context")
_PLUMBING = re.compile(
    r"DataLoader worker \(pid|DataLoader timed out|shared memory|Too many open files|ancdata|file </torch"
)
_OF_THE_USERS = "in DataLoader worker process"
_WAY_OUT = "most likely memory, /dev/shm or open files ran out: use fewer workers or none, or raise the limit"
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


class Reader:
    """Goes through an iterable once, in this process or by a DataLoader's workers.

    Args:
        data: What is iterated; workers of a DataLoader start now.
    """

    def __init__(self, data: Any) -> None:
        self._has_workers = isinstance(data, DataLoader) and data.num_workers > 0
        self.entries: Iterator[Any] = iter(data)
        if getattr(self.entries, "_worker_pids_set", False):
            # torch raises the death of a worker from a handler of SIGCHLD, so at any moment, within an update too.
            # A read sees it by itself.
            torch._C._remove_worker_pids(id(self.entries))
            self.entries._worker_pids_set = False  # type: ignore[attr-defined]

    def read(self) -> Any:
        """The next entry, or END.

        Raises:
            DataWorkerError: A worker died, or what it hands data over in ran out. What the data raises comes through.
        """
        try:
            return next(self.entries, END)
        except (RuntimeError, OSError, EOFError) as error:
            said = _what_failed(error) if self._has_workers else None
            if said is None:
                raise
            raise DataWorkerError(f"a process that reads data failed ({said})", hint=_WAY_OUT) from error

    def __iter__(self) -> Iterator[Any]:
        """All entries that are left."""
        while (entry := self.read()) is not END:
            yield entry

    def close(self, *, also_kept: bool = True) -> None:
        """End its workers at once, also one that is in the midst of an item.

        Args:
            also_kept: Also those that their DataLoader keeps for the next epoch.
        """
        if self._has_workers and (also_kept or not getattr(self.entries, "_persistent_workers", False)):
            for worker in getattr(self.entries, "_workers", ()):
                worker.terminate()  # torch has a worker leave quietly when its parent sends this
            getattr(self.entries, "_shutdown_workers", lambda: None)()


def worker_options(settings: DataSettings, loader: DataLoader[Any] | None = None) -> dict[str, Any]:
    """What a DataLoader of ours is made with: as the user's, where there is one that has workers."""
    pins = settings.card is not None or (loader is not None and loader.pin_memory)
    options: dict[str, Any] = {"num_workers": settings.workers}
    if loader is not None and loader.num_workers > 0:
        options = {name: getattr(loader, name) for name in _OPTIONS}
    start = WorkerInit(None if loader is None else loader.worker_init_fn, options.get("multiprocessing_context"))
    return {**options, "worker_init_fn": start, "pin_memory": pins and torch.accelerator.is_available()}


def to_shared_memory(part: Any) -> Any:
    """A part, or a list of samples, as a worker gives it away: in shared memory, or an error that says why not.

    The queue would move it there in a thread of its own, where a lack of it is printed and the reader waits for ever.
    """
    if get_worker_info() is not None:
        for tensor in pytree.tensors(part):
            if tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
    return part


def _what_failed(error: Exception) -> str | None:
    """The line that says so of a worker or its queue; None where the user's own code failed."""
    text = str(error)
    if isinstance(error, RuntimeError):
        return next((line for line in text.splitlines() if _PLUMBING.search(line)), None)
    return None if _OF_THE_USERS in text else first_line(error) or type(error).__name__


class WorkerInit:
    """The `worker_init_fn` of our own loaders: leave Ctrl-C to the main process, end with it, then the user's own.

    torch's workers look every few seconds whether their parent is still who it was when they began to look. One whose
    parent was killed before that would wait for ever, and with it who reads the pipes it inherited.

    Args:
        users: The user's own `worker_init_fn`.
        context: How workers are started: a multiprocessing context, or the name of one; None: as is usual here.
    """

    def __init__(self, users: Callable[[int], Any] | None, context: Any = None) -> None:
        self._users = users
        method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
        # A fork server is its workers' parent, and ends with the main process by itself.
        self._parent = None if method == "forkserver" else os.getpid()

    def __call__(self, worker_id: int) -> None:
        """Run in the worker, whose number is `worker_id`."""
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
