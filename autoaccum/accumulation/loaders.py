"""A loader's micro-batches, grouped into windows of one update each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from operator import index
from typing import TypeVar

from autoaccum.errors import UsageError

Batch = TypeVar("Batch")


def windows(loader: Iterable[Batch], iter_size: int) -> Iterator[list[Batch]]:
    """Group what `loader` yields into lists of `iter_size`; the last one may be shorter.

    Made for `Accumulator.step_parts`, which weights a short window by what it has. Micro-batches are fetched when
    their window is asked for, and none is fetched ahead.

    Raises:
        UsageError: `iter_size` is not at least 1.

    >>> list(windows("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    if index(iter_size) < 1:
        raise UsageError(f"iter_size is {iter_size}", hint="use at least 1 micro-batch per update")
    return _windows(iter(loader), iter_size)


def _windows(batches: Iterator[Batch], iter_size: int) -> Iterator[list[Batch]]:
    while window := list(islice(batches, iter_size)):
        yield window
        del window
