"""Samples of a workload: a few to experiment with, and the longest of its dataset as the worst case."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autoaccum.checks import describe_type, read_count, type_name
from autoaccum.errors import WorkloadError
from autoaccum.workload import pytree
from autoaccum.workload.batches import Batching, batch_size, has_size, wrap_batch
from autoaccum.workload.model_copies import fixed_seeds
from autoaccum.workload.spec import Workload, no_batch
from autoaccum.workload.tracebacks import user_code

_COLLATE = "write def collate(samples) in the workload, as the training's loader has it"
_SEED = 0


class LongestBatches:
    """Batches of samples, the longest first; from the start again where there are fewer than asked for.

    Args:
        samples: The longest first, at least one.
        collate: From a list of samples to a batch; None: as a DataLoader does by itself.
        batching: How batches are counted.
    """

    def __init__(
        self,
        samples: Sequence[Any],
        collate: Callable[[list[Any]], Any] | None,
        batching: Batching | None = None,
    ) -> None:
        self._samples, self._collate, self._batching = samples, collate, batching

    def __call__(self, size: int) -> Any:
        """One batch of `size` samples.

        Raises:
            WorkloadError: They cannot be put together, or `collate` makes another number of samples of them.
        """
        samples = list(itertools.islice(itertools.cycle(self._samples), size))
        collate, hint = (default_collate, _COLLATE) if self._collate is None else (self._collate, None)
        with user_code(f"putting the {size} longest samples together", hint=hint):
            made = wrap_batch(collate(samples), self._batching)
        if not has_size(made, size):
            raise WorkloadError(
                f"collate() made {batch_size(made)} samples of {size}", hint="return as many as it is given"
            )
        return made


def take_longest(workload: Workload, count: Any, most: int | None = None) -> Workload:
    """`workload`, whose batches are made of the longest of `count` samples of its dataset.

    They are spread over the dataset, one at random of each stretch of equal length; all where it has no more; and the
    first ones of what can only be gone through. The choice is the same each time. They are read now, with fixed
    seeds; random states are put back.

    Args:
        workload: Its `collate` makes batches of samples.
        count: How many samples to look at.
        most: How many of the longest are ever asked for; the others are not kept. None: all.

    Raises:
        WorkloadError: There is no dataset, it has no samples, or they have no tensors; or reading it raises.
    """
    number = read_count(count, "the number of samples to look at", error=WorkloadError)
    if workload.dataset is None or isinstance(workload.dataset, DataLoader):
        raise WorkloadError(
            f"dataset is {describe_type(workload.dataset)}, to look for the longest samples in",
            hint="define dataset = loader.dataset and collate = loader.collate_fn, or write batch(size)",
        )
    with fixed_seeds(), user_code("the dataset"):
        longest = longest_first(_some_samples(workload.dataset, number), number if most is None else most)
    if not longest:
        raise WorkloadError("the dataset has no samples", hint="give one that has, or write def batch(size)")
    made = LongestBatches(longest, workload.collate, workload.batching)
    return dataclasses.replace(workload, batch=made, worst_of=number)


def longest_first(samples: Iterable[Any], most: int) -> list[Any]:
    """The `most` longest samples, the longest first, and equal ones in the order they came.

    Raises:
        WorkloadError: None of them has a length.
    """
    longest = heapq.nlargest(most, samples, key=_length)
    if longest and _length(longest[0]) < 0:
        raise WorkloadError(
            f"the samples have no tensors to tell their length by, the first is {describe_type(longest[0])}",
            hint="have the dataset return tensors, arrays or lists of numbers, or write def batch(size)",
        )
    return longest


def spread_indices(total: int, count: int) -> list[int]:
    """`count` of `total` indices, ascending: one at random of each stretch of equal length; all where there are fewer.

    >>> spread_indices(3, 5), len(set(spread_indices(1000, 7)))
    ([0, 1, 2], 7)
    """
    if total <= count:
        return list(range(total))
    draw = random.Random(_SEED)
    return [draw.randrange(part * total // count, (part + 1) * total // count) for part in range(count)]


def _some_samples(dataset: Any, count: int) -> Iterator[Any]:
    # The base class of an IterableDataset has a __getitem__, which only raises; a length is its own affair.
    has_indices = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
    if has_indices and hasattr(dataset, "__len__"):
        return (dataset[index] for index in spread_indices(len(dataset), count))
    return itertools.islice(iter(dataset), count)


def _length(sample: Any) -> int:
    """The elements of a sample; -1 where nothing in it can be counted."""
    elements = list(_elements(sample))
    return sum(elements) if elements else -1


def _elements(node: Any) -> Iterator[int]:
    """The number of elements of every tensor, array and list of numbers in a sample."""
    if isinstance(node, Tensor):
        yield node.numel()
    elif isinstance(node, np.ndarray):
        yield node.size
    elif isinstance(node, list) and node and all(isinstance(entry, numbers.Real) for entry in node):
        yield len(node)
    else:
        for _, child in pytree.children(node) or ():
            yield from _elements(child)


def take_small_batch(workload: Workload, size: int) -> Any:
    """`size` samples: of the dataset where they make what `batch(size)` looks like or there is no `batch`, else that.

    Raises:
        WorkloadError: `batch` or the dataset raises, `batch` returns another number of samples, or there is none, and
            the dataset is too short or its samples cannot be put together.
    """
    made = None
    if workload.batch is not no_batch:
        with user_code(f"batch({size})"):
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
        with user_code("putting samples of the dataset together"):
            return wrap_batch(collate(samples), workload.batching)
    try:
        collated = wrap_batch(collate(samples), workload.batching)
        return collated if _form(collated) == _form(made) and batch_size(collated) == size else made
    except (TypeError, RuntimeError, ValueError, KeyError, WorkloadError):
        return made


def _first_samples(dataset: Any, size: int) -> list[Any]:
    """Some samples of a dataset; none from what can be read only once, or yields batches."""
    if dataset is None or isinstance(dataset, DataLoader) or hasattr(dataset, "__next__"):
        return []
    with user_code("the dataset"):
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return [dataset[index] for index in range(min(size, len(dataset)))]
        return list(itertools.islice(iter(dataset), size))


def _form(node: Any) -> Any:
    """The nest of a batch without its sizes: `default_collate` makes lists of tuples, which are called alike."""
    children = pytree.children(node)
    if children is None:
        return "tensor" if pytree.is_leaf(node) else type_name(node)
    form = "sequence" if pytree.is_sequence(node) else type_name(node)
    return form, tuple((step, _form(child)) for step, child in children)


def apply_settings(
    workload: Workload, *, most: int | None = None, worst_of: int | None = None, **settings: Any
) -> Workload:
    """`workload` with those of `settings` in place of its own that are not None.

    Args:
        workload: As its file or its author has it.
        most: Samples of the largest training batch that will be asked for.
        worst_of: Make batches of the longest of so many samples of the dataset.
        settings: Fields of `Workload`.

    Raises:
        WorkloadError: A setting cannot be honoured, or there are neither `batch` nor samples to make one of.
    """
    workload = replace_fields(workload, **settings)
    if worst_of is not None:
        largest = None if most is None else max(most, workload.evaluation_batch or 0)
        return take_longest(workload, worst_of, largest)
    if workload.batch is no_batch:
        raise WorkloadError(
            "the workload defines no 'batch'",
            hint="write def batch(size): return a batch of that many samples; or have batches made of the longest"
            " samples of its dataset by --worst-of N",
        )
    return workload


def replace_fields(workload: Workload, **settings: Any) -> Workload:
    """`workload` with those fields of `settings` that are not None in place of its own.

    Raises:
        WorkloadError: One of them cannot be used.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return dataclasses.replace(workload, **given) if given else workload
