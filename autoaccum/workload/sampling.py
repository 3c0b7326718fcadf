"""A few samples to experiment with."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import DataLoader, default_collate

from autoaccum.errors import WorkloadError
from autoaccum.workload import nests
from autoaccum.workload.batches import batch_size, counted
from autoaccum.workload.experiments import users_code
from autoaccum.workload.spec import Workload, no_batch


def take_small_batch(workload: Workload, size: int) -> Any:
    """`size` samples: of the dataset where they make what `batch(size)` looks like or there is no `batch`, else that.

    Raises:
        WorkloadError: `batch` or the dataset raises, `batch` returns another number of samples, or there is none, and
            the dataset is too short or its samples cannot be put together.
    """
    made = None
    if workload.batch is not no_batch:
        with users_code(f"batch({size})"):
            made = workload.build_batch(size)
    samples = _first_samples(workload.dataset, size)
    if len(samples) < size:
        if made is None:
            raise WorkloadError(
                f"the dataset gives {len(samples)} samples, {size} are asked for", hint="write def batch(size)"
            )
        return made
    collate = default_collate if workload.collate is None else workload.collate
    if made is None:
        with users_code("putting samples of the dataset together"):
            return counted(collate(samples), workload.batching)
    try:
        collated = counted(collate(samples), workload.batching)
        return collated if _form(collated) == _form(made) and batch_size(collated) == size else made
    except (TypeError, RuntimeError, ValueError, KeyError, WorkloadError):
        return made


def _first_samples(dataset: Any, size: int) -> list[Any]:
    """Some samples of a dataset; none from what can be read only once, or yields batches."""
    if dataset is None or isinstance(dataset, DataLoader) or hasattr(dataset, "__next__"):
        return []
    with users_code("the dataset"):
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return [dataset[index] for index in range(min(size, len(dataset)))]
        return list(itertools.islice(iter(dataset), size))


def _form(node: Any) -> Any:
    """The nest of a batch without its sizes: `default_collate` makes lists of tuples, which are called alike."""
    children = nests.children(node)
    if children is None:
        return "tensor" if nests.is_leaf(node) else nests.type_name(node)
    form = "sequence" if nests.is_sequence(node) else nests.type_name(node)
    return form, tuple((step, _form(child)) for step, child in children)
