"""What a process that reads does before anything else."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from autoaccum.training.data.fetching import PartFetcher

_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


class WorkerStart:
    """The `worker_init_fn` of our own loaders: leave Ctrl-C to the main process, end with it, then the user's own.

    torch's workers look every few seconds whether their parent is still who it was when they began to look. One whose
    parent was killed before that waits for ever, with its memory and all it inherited: pipes, for one, whose readers
    then wait for their end.

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
            _end_with(self._parent)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, PartFetcher):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._users is not None:
            self._users(worker_id)


def _end_with(parent: int) -> None:
    """Have the system end this process when its parent ends, which it may have done already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
