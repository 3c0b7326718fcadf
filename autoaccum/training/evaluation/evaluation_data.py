"""What a model is evaluated on: read in order, and from the start each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.errors import UsageError
from autoaccum.training.data.source import is_map_style, is_taken_apart
from autoaccum.workload.nests import kind, type_name


class EvaluationData:
    """Samples or batches of an evaluation.

    Args:
        data: As for training. A dataset's samples are collated in parts as large as the evaluation can take; a
            DataLoader's batches, and those of another iterable, are kept unless they are too large.
        collate: `collate(samples)`; None: torch's default_collate.
        workers: Processes that read a map-style dataset; a DataLoader has its own.
        trained_on: What is trained on meanwhile, which may be the same; None: nothing.

    Raises:
        UsageError: It can be read only once, is no such data, or keeps one place for training and evaluation.
    """

    def __init__(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        trained_on: Any = None,
    ) -> None:
        if hasattr(data, "__next__"):
            raise UsageError(
                f"the evaluation data is {kind(data)}, which can be read only once",
                hint="give a dataset, a DataLoader or a list of batches: each evaluation reads it from the start",
            )
        _check_shared(data, trained_on)
        self._data, self._collate, self._workers = data, collate, workers
        self._has_samples = is_map_style(data) or isinstance(data, IterableDataset)
        if not self._has_samples and not hasattr(data, "__iter__"):
            raise UsageError(
                f"the evaluation data is {kind(data)}", hint="give a dataset, a DataLoader or an iterable of batches"
            )

    def batches(self, size: int, seed: int) -> Iterator[Any]:
        """All of it, on the CPU; samples of a dataset in batches of `size`, the last one may be smaller."""
        if not self._has_samples:
            return iter(self._data)
        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_size=size,
            collate_fn=self._collate,
            num_workers=self._workers if is_map_style(self._data) else 0,
            generator=torch.Generator().manual_seed(seed),
        )
        return iter(loader)


def _check_shared(data: Any, trained_on: Any) -> None:
    """Refuse what keeps one place for both: training would lose what an evaluation reads.

    Raises:
        UsageError: It does.
    """
    if is_map_style(trained_on) or (isinstance(trained_on, DataLoader) and is_taken_apart(trained_on)):
        return
    trained = [trained_on, getattr(trained_on, "dataset", None)]
    for one in (data, getattr(data, "dataset", None)):
        if any(one is other for other in trained) and _keeps_place(one):
            raise UsageError(
                f"evaluation and training read the same {type_name(one)}, which keeps its place in itself",
                hint="give a second one as the evaluation data: copy.deepcopy makes one",
            )


def _keeps_place(data: Any) -> bool:
    is_stateful = all(callable(getattr(data, f"{x}state_dict", None)) for x in ("", "load_"))
    return hasattr(data, "__next__") or is_stateful or getattr(data, "persistent_workers", False) is True
