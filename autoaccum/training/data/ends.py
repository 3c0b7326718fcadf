"""Ends of data that are none: a StopIteration that escaped from a dataset, a transform or a collate function.

Python makes such a one a RuntimeError where it leaves a generator (PEP 479); a DataLoader takes it for its own end.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from autoaccum.workload import nests

_FROM_WORKER = "in DataLoader worker process"


class NoEnd:
    """A function of the user's whose StopIteration is an error.

    Args:
        function: The function.
        what: What it is, for messages.
    """

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        self._function, self._what = function, what

    def __call__(self, *arguments: Any) -> Any:
        """Call it.

        Raises:
            RuntimeError: It raised StopIteration.
        """
        try:
            return self._function(*arguments)
        except StopIteration as error:
            raise no_end(self._what) from error


def iterated(data: Any) -> Iterator[Any]:
    """`iter(data)`; of a DataLoader, one whose collate function does not end it."""
    if not isinstance(data, DataLoader) or data.collate_fn is None:
        return iter(data)
    collate = data.collate_fn
    data.collate_fn = NoEnd(collate, "collate")
    try:
        return iter(data)
    finally:
        data.collate_fn = collate


def check_end(error: StopIteration, data: Any) -> None:
    """See that the end of `data` is one.

    Raises:
        RuntimeError: Its map-style dataset raised it, here or in a worker.
    """
    if not isinstance(data, DataLoader):
        return
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    if _FROM_WORKER in str(error) or _MapDatasetFetcher.fetch.__code__ in frames:
        raise no_end(nests.kind(data.dataset)) from error


def no_end(what: str) -> RuntimeError:
    """The error that a StopIteration of the user's `what` is."""
    return RuntimeError(f"{what} raised StopIteration, which would end the epoch early")
