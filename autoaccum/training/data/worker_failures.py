"""What is told when processes that read data die, cannot be started, or run out of what they share."""

from __future__ import annotations

import errno
import re
import signal
import time
import traceback
from collections.abc import Sequence
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from autoaccum.errors import AutoaccumError, DataWorkerError, first_line

_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)?:? .*\) (?:exited unexpectedly|is killed by signal)")
_SHARED_MEMORY = re.compile(
    r"out of shared memory|Unexpected bus error|unable to allocate shared memory"
    r"|unable to (?:write to|resize|mmap \d+ bytes from) file <"
)
_FULL_TABLE = re.compile(
    r"Too many open files\. Communication with the workers|received \d+ items of ancdata"
    r"|unable to (?:open|mmap|resize).* file.*: Too many open files|unable to open shared memory.*Too many open files"
)
_TIMED_OUT = re.compile(r"DataLoader timed out after")
_USERS = "in DataLoader worker process"
_ENDING_SECONDS = 1.0
_FEWER = "use fewer workers or none, or read smaller items"


def explain_worker_failure(error: BaseException, workers: Sequence[Any] = ()) -> AutoaccumError | None:
    """The error that says why a DataLoader's workers failed; None where `error` is another error."""
    text = str(error)
    full = _SHARED_MEMORY.search(text) if isinstance(error, RuntimeError) else None
    if full is not None:
        # Also from within a worker, where a batch is put together in shared memory.
        return _full(next(line for line in text.splitlines() if full.group() in line))
    if isinstance(error, RuntimeError) and _FULL_TABLE.search(text):
        return _too_many_files("Too many open files")
    if _USERS in text:
        return None
    died = isinstance(error, RuntimeError) and _DIED.search(text) is not None
    # What a dead worker had still to hand over ends in an error of its connection.
    died = died or (isinstance(error, ConnectionError | EOFError | FileNotFoundError) and _any_dies(workers))
    codes = {worker.exitcode for worker in workers}
    if died and -signal.SIGBUS in codes:
        return _full(_said(error))
    if died:
        return DataWorkerError(_how_it_ended(_said(error), codes), hint=_way_out(codes))
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(text):
        return DataWorkerError(_said(error), hint="give the DataLoader a longer timeout, or more workers")
    return None


def explain_failed_start(error: OSError) -> AutoaccumError | None:
    """The error that says why workers could not be started; None where `error` is another error."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return _too_many_files(_said(error))
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return DataWorkerError(f"a process that reads data could not be started ({_said(error)})", hint=_FEWER)
    return None


def half_started(error: BaseException) -> Any:
    """The DataLoader's iterator that `error` kept from starting all its workers; None where there is none."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((owner for owner in owners if isinstance(owner, _MultiProcessingDataLoaderIter)), None)


def _too_many_files(said: str) -> DataWorkerError:
    return DataWorkerError(
        f"file descriptors for the processes that read data ran out ({said})",
        hint="raise the limit (`ulimit -n 4096`), or use fewer workers or none",
    )


def _full(said: str) -> DataWorkerError:
    return DataWorkerError(
        f"the shared memory that workers hand data over in ran out ({said})",
        hint=f"give /dev/shm more space (docker run --shm-size=8g), {_FEWER}",
    )


def _any_dies(workers: Sequence[Any]) -> bool:
    """Whether one of them ended by itself; what was seen of it may come before its end does."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while workers and time.monotonic() < deadline:
        if any(worker.exitcode for worker in workers):
            return True
        time.sleep(0.01)
    return False


def _said(error: BaseException) -> str:
    return first_line(error) or type(error).__name__


def _how_it_ended(text: str, codes: set[int | None]) -> str:
    ended = sorted(code for code in codes if code)
    if not ended:
        return f"a process that reads data died ({text})"
    ways = [signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in ended]
    return f"a process that reads data died: {', '.join(ways)} ({text})"


def _way_out(codes: set[int | None]) -> str:
    if -signal.SIGKILL in codes:
        return f"most likely host memory ran out: {_FEWER}"
    return "set workers to 0 to see what the dataset does there; where memory ran out, use fewer"
