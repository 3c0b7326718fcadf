"""What a model is evaluated on: read in order, and from the start each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.accumulation.randomness import GENERATORS, Generator
from autoaccum.errors import UsageError
from autoaccum.training.data.source import is_map_style
from autoaccum.workload.nests import kind


class EvaluationData:
    """Samples or batches of an evaluation.

    Args:
        data: As for training. A dataset's samples are collated in parts as large as the evaluation can take; a
            DataLoader's batches, and those of another iterable, are kept unless they are too large.
        collate: `collate(samples)`; None: torch's default_collate.
        workers: Processes that read a map-style dataset; a DataLoader has its own.

    Raises:
        UsageError: It can be read only once, or is no such data.
    """

    def __init__(self, data: Any, *, collate: Callable[[list[Any]], Any] | None = None, workers: int = 0) -> None:
        if hasattr(data, "__next__"):
            raise UsageError(
                f"the evaluation data is {kind(data)}, which can be read only once",
                hint="give a dataset, a DataLoader or a list of batches: each evaluation reads it from the start",
            )
        self._data, self._collate, self._workers = data, collate, workers
        self._has_samples = is_map_style(data) or isinstance(data, IterableDataset)
        if not self._has_samples and not hasattr(data, "__iter__"):
            raise UsageError(
                f"the evaluation data is {kind(data)}", hint="give a dataset, a DataLoader or an iterable of batches"
            )

    @property
    def generators(self) -> list[Generator]:
        """Those that reading may draw from, beside the global ones."""
        sampler = getattr(self._data, "sampler", None)
        dataset = getattr(self._data, "dataset", None)
        owners = [self._data, sampler, dataset]
        found = (value for owner in owners for value in getattr(owner, "__dict__", {}).values())
        return list({id(value): value for value in found if isinstance(value, GENERATORS)}.values())

    def batches(self, size: int, seed: int) -> Iterator[Any]:
        """All of it, on the CPU; samples of a dataset in batches of `size`, the last one may be smaller."""
        if not self._has_samples:
            return iter(self._data)
        return iter(
            DataLoader(
                self._data,
                batch_size=size,
                collate_fn=self._collate,
                num_workers=self._workers if is_map_style(self._data) else 0,
                generator=torch.Generator().manual_seed(seed),
            )
        )
