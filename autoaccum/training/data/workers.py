"""Processes that fetch parts ahead: one DataLoader of our own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from autoaccum.training.data.ends import iterated
from autoaccum.training.data.fetching import PartFetcher, PartRequest
from autoaccum.training.data.held_parts import copied
from autoaccum.training.data.pinning import current
from autoaccum.training.data.worker_failures import explain_failed_start, explain_worker_failure, half_started
from autoaccum.training.data.worker_start import WorkerStart
from autoaccum.training.seeds import kept_randomness
from autoaccum.workload import nests

_ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class WorkerOptions:
    """How a DataLoader reads ahead; the names are its own, but for `card`, which pinned memory is for."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    timeout: float = 0
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    multiprocessing_context: Any = None
    card: torch.device | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any], *, workers: int = 0, card: torch.device | None = None) -> WorkerOptions:
        """Those of a user's loader; `workers` where it asks for none, and pinned memory where there is a `card`."""
        pins = loader.pin_memory or card is not None
        if loader.num_workers == 0:
            return cls(num_workers=workers, pin_memory=pins, worker_init_fn=loader.worker_init_fn, card=card)
        return cls(
            num_workers=loader.num_workers,
            pin_memory=pins,
            persistent_workers=loader.persistent_workers,
            timeout=loader.timeout,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            card=card,
        )


class PartReader:
    """Reads requested parts in order, with workers or in this process.

    Args:
        fetcher: Makes a part of a request.
        options: How to read ahead.
        seed: Of the workers.
        requests_draw: Whether making requests, which is done in this process, may draw from the global generators.
    """

    def __init__(self, fetcher: PartFetcher, options: WorkerOptions, seed: int, requests_draw: bool = True) -> None:
        self._fetcher, self._options, self._seed = fetcher, options, seed
        self._requests_draw = requests_draw
        self._requests: Iterator[PartRequest] = iter(())
        self._sizes: deque[int] = deque()
        self._loader: DataLoader[Any] | None = None
        self._parts: Iterator[Any] | None = None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Put the generators back that reading seeds in this process: all that reads goes in here."""
        with current(self._options.card), self._kept_randomness():
            yield

    def _kept_randomness(self) -> AbstractContextManager[None]:
        if self._options.num_workers == 0 and self._fetcher.draws:
            return self._fetcher.kept_randomness()
        return kept_randomness() if self._requests_draw else nullcontext()

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
            with current(self._options.card):
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
        return started(self._loader)

    def _make_loader(self, pins: bool) -> DataLoader[Any]:
        options = self._options
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_sampler=self,  # type: ignore[arg-type]
            num_workers=options.num_workers,
            collate_fn=handed_over,
            pin_memory=pins,
            timeout=options.timeout,
            worker_init_fn=WorkerStart(options.worker_init_fn, options.multiprocessing_context),
            multiprocessing_context=options.multiprocessing_context,
            generator=torch.Generator().manual_seed(self._seed),
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
        )


def started(data: Any) -> Iterator[Any]:
    """`iter(data)`, of a DataLoader or another iterable.

    Raises:
        DataWorkerError: Not all workers could be started; those that were are ended.
    """
    try:
        return unwatched(iterated(data))
    except OSError as error:
        explained = explain_failed_start(error)
        if explained is None:
            raise
        end_workers(half_started(error))
        raise explained from error


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
    if shut_down is None:
        return
    if not hasattr(parts, "_workers_status"):  # Only some were started, and torch would trip over that.
        parts._shutdown = True  # type: ignore[union-attr]
        for worker in workers_of(parts):
            worker.join(_ENDING_SECONDS)
    shut_down()


def handed_over(part: Any) -> Any:
    """What a DataLoader is to do with what is put together already: copy what is not in shared memory into it.

    The queue would move it there in a thread of its own, where a lack of it is printed and the reader waits for ever,
    and with it a buffer that is filled again for the next part.
    """
    return part if get_worker_info() is None else _shared(part)


def _shared(node: Any) -> Any:
    if isinstance(node, Tensor):
        return copied(node).share_memory_() if _can_be_shared(node) else node
    children = nests.children(node) or []
    shared = [_shared(child) for _, child in children]
    if all(new is old for new, (_, old) in zip(shared, children, strict=True)):
        return node
    return nests.rebuild(node, shared)


def _can_be_shared(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
        return False
    return not tensor.is_shared()  # type: ignore[no-untyped-call]
