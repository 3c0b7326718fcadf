"""Several jobs at once, each of which drives a process; however it ends, none of them goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
_MOST_AT_ONCE = 2
"""Each takes a processor and the memory of a PyTorch."""


def run_side_by_side(jobs: Sequence[Callable[[Callable[[], bool]], T]]) -> list[T]:
    """The results of all jobs, in their order; two run at a time where there are the processors for it.

    Each gets a function that tells whether it is to stop: after Ctrl-C, or an error of another one. It does so soon,
    by KeyboardInterrupt.

    Raises:
        BaseException: What a job raised first; the others have ended by then.
    """
    at_once = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)), len(jobs))
    if at_once < 2:
        return [job(lambda: False) for job in jobs]
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(job, stop.is_set) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise
