"""What a model is evaluated on: read in order, and from the start each time."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import fetch

from autoaccum.accumulation.randomness import Generator
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.training.data.kept_generators import find_generators
from autoaccum.training.data.source import is_map_style, is_taken_apart
from autoaccum.workload.nests import kind, type_name

_FETCH = fetch.__file__


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
        keeps_workers = isinstance(data, DataLoader) and data is trained_on and data.persistent_workers
        self._data: Any = _apart(data) if keeps_workers else data
        self._collate, self._workers = collate, workers
        self._has_samples = is_map_style(data) or isinstance(data, IterableDataset)
        if not self._has_samples and not hasattr(data, "__iter__"):
            raise UsageError(
                f"the evaluation data is {kind(data)}", hint="give a dataset, a DataLoader or an iterable of batches"
            )

    @property
    def generators(self) -> list[Generator]:
        """Those that reading may draw from, beside the global ones."""
        roots = [self._data]
        if isinstance(self._data, DataLoader):  # Its iterator keeps processes and queues.
            roots = [value for name, value in vars(self._data).items() if name != "_iterator"]
        return find_generators(*roots, self._collate)

    def batches(self, size: int, seed: int) -> Iterator[Any]:
        """All of it, on the CPU; samples of a dataset in batches of `size`, the last one may be smaller.

        Raises:
            WorkloadError: A sample, or their collation, raises StopIteration: not the end of the data.
        """
        data = self._loader(size, seed) if self._has_samples else self._data
        entries = iter(data)
        while True:
            try:
                entry = next(entries)
            except StopIteration as error:
                if isinstance(data, DataLoader) and not _is_end(error, data):
                    ended = WorkloadError("StopIteration was raised within the evaluation data, which is no end of it")
                    raise ended.with_traceback(error.__traceback__) from None
                return
            yield entry

    def _loader(self, size: int, seed: int) -> DataLoader[Any]:
        return DataLoader(
            self._data,
            batch_size=size,
            collate_fn=self._collate,
            num_workers=self._workers if is_map_style(self._data) else 0,
            generator=torch.Generator().manual_seed(seed),
        )


def _is_end(error: StopIteration, loader: DataLoader[Any]) -> bool:
    """Whether the sampler, or the iterable that is read, came to its end: where it did is told by the frames."""
    if "in DataLoader worker process" in str(error):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if _FETCH not in files:
        return True
    takes_apart = isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None
    return files[-1] == _FETCH if takes_apart else isinstance(loader.dataset, IterableDataset)


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
    return hasattr(data, "__next__") or all(callable(getattr(data, f"{x}state_dict", None)) for x in ("", "load_"))


def _apart(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader with an iterator of its own: one that keeps its workers has one for all who read it."""
    own = copy.copy(loader)
    own._iterator = None
    return own
