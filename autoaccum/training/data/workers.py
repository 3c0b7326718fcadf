"""Processes that fetch parts ahead: one DataLoader of our own, and what is told when one of its workers dies."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from autoaccum.errors import AutoaccumError, DataWorkerError, first_line
from autoaccum.training.data.fetching import PartFetcher, PartRequest
from autoaccum.workload import nests

_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)?:? .*\) (?:exited unexpectedly|is killed by signal)")
_SHARED_MEMORY = re.compile(
    r"out of shared memory|Unexpected bus error|unable to allocate shared memory"
    r"|unable to (?:write to|resize|mmap \d+ bytes from) file <"
)
_TIMED_OUT = re.compile(r"DataLoader timed out after")
_USERS = "in DataLoader worker process"
_ENDING_SECONDS = 1.0
_FEWER = "use fewer workers or none, or read smaller items"


@dataclass(frozen=True)
class WorkerOptions:
    """How a DataLoader reads ahead; the names are its own."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    timeout: float = 0
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    multiprocessing_context: Any = None

    @classmethod
    def of(cls, loader: DataLoader[Any], *, workers: int = 0, pin_memory: bool = False) -> WorkerOptions:
        """Those of a user's loader; `workers` and `pin_memory` where it asks for none."""
        if loader.num_workers == 0:
            pins = loader.pin_memory or pin_memory
            return cls(num_workers=workers, pin_memory=pins, worker_init_fn=loader.worker_init_fn)
        return cls(
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory or pin_memory,
            persistent_workers=loader.persistent_workers,
            timeout=loader.timeout,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )


class PartReader:
    """Reads requested parts in order, with workers or in this process."""

    def __init__(self, fetcher: PartFetcher, options: WorkerOptions, seed: int) -> None:
        self._fetcher, self._options, self._seed = fetcher, options, seed
        self._requests: Iterator[PartRequest] = iter(())
        self._sizes: deque[int] = deque()
        self._loader: DataLoader[Any] | None = None
        self._parts: Iterator[Any] | None = None

    def undisturbed(self) -> AbstractContextManager[None]:
        """Put the generators back that reading seeds in this process: all that reads goes in here."""
        is_here = self._options.num_workers == 0
        return self._fetcher.kept_randomness() if is_here and self._fetcher.draws else nullcontext()

    def start(self, requests: Iterator[PartRequest]) -> None:
        """Read `requests` from now on; what was read ahead of others is dropped.

        Workers start anew and so know the dataset as it is by now, unless a user's loader keeps its own.
        """
        if not self._options.persistent_workers:
            end_workers(self._parts)
        self._requests, self._parts = requests, None
        self._sizes.clear()
        self._fetcher.look()
        if self._options.num_workers > 0:
            self._parts = self._begin()

    def read(self) -> tuple[int, Any] | None:
        """The next part and its number of samples; None at the end.

        Raises:
            DataWorkerError: A worker died, or the memory it shares ran out. What the dataset raises comes through.
        """
        if self._parts is None:
            self._parts = self._begin()
        try:
            part = next(self._parts)
        except StopIteration:
            return None
        except (RuntimeError, OSError, EOFError) as error:
            explained = explain_worker_failure(error, workers_of(self._parts))
            if explained is None:
                raise
            raise explained from error
        return self._sizes.popleft(), part

    def close(self) -> None:
        """End the workers, whatever they are at."""
        kept = getattr(self._loader, "_iterator", None)
        parts, self._parts, self._loader = self._parts, None, None
        end_workers(kept if parts is None else parts)

    def __iter__(self) -> Iterator[PartRequest]:
        """What the DataLoader takes for its batch sampler: the requests, whose sizes are noted."""
        for request in self._requests:
            self._sizes.append(len(request.indices))
            yield request

    def _begin(self) -> Iterator[Any]:
        pins = self._options.pin_memory and torch.accelerator.is_available()
        if self._options.num_workers == 0 and not pins:
            return map(self._fetcher.__getitems__, self)
        if self._loader is None:
            self._loader = self._make_loader(pins)
        return unwatched(iter(self._loader))

    def _make_loader(self, pins: bool) -> DataLoader[Any]:
        options = self._options
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_sampler=self,  # type: ignore[arg-type]
            num_workers=options.num_workers,
            collate_fn=handed_over,
            pin_memory=pins,
            timeout=options.timeout,
            worker_init_fn=WorkerStart(options.worker_init_fn),
            multiprocessing_context=options.multiprocessing_context,
            generator=torch.Generator().manual_seed(self._seed),
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
        )


class WorkerStart:
    """What a worker does first: leave Ctrl-C to the main process, and the user's own start."""

    def __init__(self, users: Callable[[int], Any] | None) -> None:
        self._users = users

    def __call__(self, worker_id: int) -> None:
        """Run in the worker, whose number is `worker_id`."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, PartFetcher):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._users is not None:
            self._users(worker_id)


def unwatched(parts: Iterator[Any]) -> Iterator[Any]:
    """`parts` of a DataLoader, whose workers' death is told where data is read, and nowhere else.

    torch raises it from a handler of SIGCHLD, so at any moment, within an update too. A read sees it by itself.
    """
    if workers_of(parts) and getattr(parts, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(parts))
        parts._worker_pids_set = False  # type: ignore[attr-defined]
    return parts


def workers_of(parts: Iterator[Any] | None) -> list[Any]:
    """The processes behind a DataLoader's iterator."""
    return list(getattr(parts, "_workers", ()))


def end_workers(parts: Iterator[Any] | None) -> None:
    """End the processes behind a DataLoader's iterator at once, also one that is in the midst of an item."""
    for worker in workers_of(parts):
        worker.terminate()  # torch has a worker leave quietly when its parent sends this
    shut_down = getattr(parts, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def explain_worker_failure(error: BaseException, workers: Sequence[Any] = ()) -> AutoaccumError | None:
    """The error that says why a DataLoader's workers failed; None where `error` is another error."""
    text = str(error)
    full = _SHARED_MEMORY.search(text) if isinstance(error, RuntimeError) else None
    if full is not None:
        # Also from within a worker, where a batch is put together in shared memory.
        return _full(next(line for line in text.splitlines() if full.group() in line))
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


def handed_over(part: Any) -> Any:
    """What a DataLoader is to do with what is put together already: move its tensors into shared memory.

    The queue would do so in a thread of its own, where a lack of it is printed and the reader waits for ever.
    """
    if get_worker_info() is not None:
        for tensor in nests.tensors(part):
            if tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
    return part
