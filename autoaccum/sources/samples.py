"""Batches made of a workload's dataset: a small one for experiments, and the longest samples as the worst case."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import numbers
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from operator import neg
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autoaccum.checks import describe_type, read_count, type_name
from autoaccum.errors import WorkloadError
from autoaccum.sources import pytree
from autoaccum.sources.batches import BatchReader, read_batch
from autoaccum.sources.model_copies import fixed_seeds
from autoaccum.sources.token_costs import read_lengths
from autoaccum.sources.workload import Workload, no_batch
from autoaccum.spec import Padding, SampleLengths
from autoaccum.tracebacks import user_code

_COLLATE = "write def collate(samples) in the workload, the collate_fn of your DataLoader"
_SEED = 0
TOKEN_SAMPLES = 10_000
"""Samples of the dataset whose lengths are read for a token budget, unless `longest_of` says otherwise."""
_LENGTH_RATIO = 1.02
"""Of lengths that differ by less than this factor, one sample is kept."""
_READ_PER_SAMPLE = 4
"""Samples of the dataset that are read for each one of a small batch."""


class LongestBatches:
    """Make batches of the longest samples, which are repeated if there are too few.

    Args:
        samples: At least one sample, the longest first.
        collate: Makes a batch of a list of samples; None: PyTorch's `default_collate`.
        batching: The workload's functions to count and split batches.
        lengths: The lengths of the samples, in tokens, if batches of a given length are to be made.
        padding: How these are laid out.
    """

    def __init__(
        self,
        samples: Sequence[Any],
        collate: Callable[[list[Any]], Any] | None,
        batching: BatchReader = None,
        lengths: Sequence[int] = (),
        padding: Padding = "longest",
    ) -> None:
        self._samples, self._collate, self._batching, self._lengths = samples, collate, batching, lengths
        self._padding = padding

    def __call__(self, size: int, length: int | None = None) -> Any:
        """Return a batch of `size` samples: the longest, or the shortest one of at least `length` tokens, repeated.

        That one is joined by those of no more tokens that have the most of anything, such as labels, since they are
        padded to the longest labels.

        Raises:
            WorkloadError: `collate` fails, or returns another number of samples.
        """
        if length is not None:
            at = max(0, bisect_right(self._lengths, -length, key=neg) - 1)
            others = self._widest(at) if self._padding == "longest" else []
            samples = [self._samples[at]] * max(1, size - len(others)) + others
            return LongestBatches(samples, self._collate, self._batching)(size)
        with user_code(f"collating the {size} longest samples", hint=_COLLATE if self._collate is None else None):
            return read_batch(self.collate(size), self._batching, size, "collate()", self.collate)

    @cached_property
    def _amounts(self) -> list[dict[str, int]]:
        """The number of elements of each part of each sample."""
        parts = [() if isinstance(sample, list) else pytree.children(sample) or () for sample in self._samples]
        return [{name: _length(part) for name, part in named} for named in parts]

    def _widest(self, at: int) -> list[Any]:
        """Return those samples behind one that have the most of a part."""
        rest = range(at, len(self._samples))
        most = {max(rest, key=lambda index: self._amounts[index].get(name, 0)) for name in self._amounts[at]}
        return [self._samples[index] for index in sorted(most - {at})]

    def collate(self, size: int) -> Any:
        """Return a batch as `collate` makes it of `size` samples."""
        samples = list(itertools.islice(itertools.cycle(self._samples), size))
        return (self._collate or default_collate)(samples)


def take_longest(workload: Workload, count: Any, largest_batch: int | None = None) -> Workload:
    """Return `workload` with batches made of the longest of `count` samples of its dataset.

    The samples are spread over the dataset: one random index from each of `count` equal ranges, the same at each call.
    Of an iterable dataset they are the first ones. They are read now, with fixed seeds.

    Args:
        workload: The workload; its `collate` makes the batches.
        count: The number of samples to read.
        largest_batch: The number of longest samples to keep, enough for the largest batch; None keeps all.

    Raises:
        WorkloadError: There is no dataset, it is empty, its samples hold no tensors, or reading it raises.
    """
    number = read_count(count, "the number of samples to read", error=WorkloadError)
    if workload.dataset is None or isinstance(workload.dataset, DataLoader):
        raise WorkloadError(
            f"dataset is {describe_type(workload.dataset)}, which has no single samples to compare by length",
            hint="define dataset = loader.dataset and collate = loader.collate_fn, or write batch(size)",
        )
    kept = number if largest_batch is None else largest_batch
    if workload.counts_tokens:
        return _take_by_tokens(workload, number, kept)
    with fixed_seeds(), user_code("the dataset"):
        longest = longest_first(some_samples(workload.dataset, number), kept, workload.collate)
    if not longest:
        raise WorkloadError("the dataset has no samples", hint="give one with samples, or write def batch(size)")
    batches = LongestBatches(longest, workload.collate, workload.batching)
    return dataclasses.replace(workload, batch=batches, longest_of=number)


def _take_by_tokens(workload: Workload, number: int, kept: int) -> Workload:
    """Return `workload` with batches of the `kept` longest of `number` samples, or of one of any length among them.

    A sample is kept for each 2 % of length: batches of a given length are made of the next longer one.

    Raises:
        WorkloadError: The dataset is empty, reading it raises, or `lengths` are those of another one.
    """
    dataset, costs = workload.dataset, workload.token_costs
    with fixed_seeds(), user_code("the dataset"):
        if not has_indices(dataset):
            dataset = [*some_samples(dataset, number)]
        indices: Sequence[int] = spread_indices(len(dataset), number)
        if workload.lengths is not None and not callable(workload.lengths):
            indices, lengths = range(len(dataset)), read_lengths(workload.lengths, len(dataset))
        else:
            lengths = [costs.of_sample(dataset[index], workload.collate, workload.batching) for index in indices]
        if not lengths:
            raise WorkloadError("the dataset has no samples", hint="give one with samples")
        order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
        chosen = order[:kept]
        for at in order[kept:]:
            if lengths[at] * _LENGTH_RATIO <= lengths[chosen[-1]] or at == order[-1]:
                chosen.append(at)
        samples, buildable = [dataset[indices[at]] for at in chosen], tuple(lengths[at] for at in chosen)
    batches = LongestBatches(samples, workload.collate, workload.batching, buildable, costs.padding)
    with user_code("lengths(batch)"):
        costs.of_batch(batches(1))  # As in training, which has no single samples.
    found = SampleLengths(
        read=tuple(sorted(lengths, reverse=True)),
        buildable=buildable,
        padding=costs.padding,
        is_whole=has_indices(workload.dataset) and len(lengths) == len(dataset),
    )
    return dataclasses.replace(workload, batch=batches, longest_of=len(lengths), sample_lengths=found)


def longest_first(samples: Iterable[Any], count: int, collate: Callable[[list[Any]], Any] | None = None) -> list[Any]:
    """Return the `count` longest samples, longest first, ties in order; raise WorkloadError if none has a length.

    Samples without tensors, such as texts, are as long as what `collate` makes of them.
    """

    def length(sample: Any) -> int:
        number = _length(sample)
        with suppress(Exception):  # It may need several samples.
            return number if number >= 0 or collate is None else _length(collate([sample]))
        return number

    longest = heapq.nlargest(count, samples, key=length)
    if longest and length(longest[0]) < 0:
        raise WorkloadError(
            f"the samples have no tensors to measure their length by, the first is {describe_type(longest[0])}",
            hint="return tensors, arrays or lists of numbers from the dataset, or write def batch(size)",
        )
    return longest


def spread_indices(total: int, count: int) -> list[int]:
    """Return `count` of `total` indices, ascending: a random one of each of `count` equal ranges; all if too few.

    >>> spread_indices(3, 5), len(set(spread_indices(1000, 7)))
    ([0, 1, 2], 7)
    """
    if total <= count:
        return list(range(total))
    rng = random.Random(_SEED)
    return [rng.randrange(part * total // count, (part + 1) * total // count) for part in range(count)]


def some_samples(dataset: Any, count: int) -> Iterator[Any]:
    """Return `count` samples spread over a dataset; the first ones of an iterable dataset."""
    if has_indices(dataset):
        return (dataset[index] for index in spread_indices(len(dataset), count))
    return itertools.islice(iter(dataset), count)


def has_indices(dataset: Any) -> bool:
    """Return whether a dataset has numbered samples; IterableDataset inherits a `__getitem__` that only raises."""
    is_iterable = isinstance(dataset, IterableDataset)
    return not is_iterable and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _length(node: Any) -> int:
    """Return the number of elements of a sample; -1 if nothing in it can be counted."""
    if isinstance(node, Tensor | np.ndarray):
        return node.numel() if isinstance(node, Tensor) else node.size
    if isinstance(node, list) and node and all(isinstance(entry, numbers.Real) for entry in node):
        return len(node)
    if (children := pytree.children(node)) is None:
        lengths = [tensor.numel() for tensor in pytree.inner_tensors(node)]
    else:
        lengths = [length for _, child in children if (length := _length(child)) >= 0]
    return sum(lengths) if lengths else -1


def take_small_batch(workload: Workload, size: int) -> Any:
    """Return a batch of `size` samples of the dataset if it has the structure of `batch(size)`, else `batch(size)`.

    Short and long samples are mixed, so that a wrong weight can show.

    Raises:
        WorkloadError: `batch` or the dataset raises, or `batch` returns another number of samples. Without `batch`: the
            dataset is too short, or its samples cannot be collated.
    """
    has_batch, hint = workload.batch is not no_batch, "write def batch(size)"
    with user_code(f"batch({size})"):
        batch = workload.build_batch(size) if has_batch else None
    samples = _mixed_samples(workload.dataset, size)
    if len(samples) < size:
        if not has_batch:
            raise WorkloadError(f"the dataset has {len(samples)} samples, {size} are needed", hint=hint)
        return batch
    with suppress(*[WorkloadError] * has_batch), user_code("collating samples of the dataset"):
        collated = (workload.collate or default_collate)(samples)
        collated = read_batch(collated, workload.batching, size, "collate()")
        return collated if not has_batch or _structure(collated) == _structure(batch) else batch
    return batch


def _mixed_samples(dataset: Any, size: int) -> list[Any]:
    """Return samples of a dataset in their order: the longest and the shortest of some, or the first of equal ones.

    There are none if it can be read only once or yields batches.
    """
    if dataset is None or isinstance(dataset, DataLoader) or hasattr(dataset, "__next__"):
        return []
    with user_code("the dataset"):
        samples = list(some_samples(dataset, _READ_PER_SAMPLE * size))
    lengths = [_length(sample) for sample in samples]
    if len(samples) <= size or len(set(lengths)) == 1:
        return samples[:size]
    ranked = sorted(range(len(samples)), key=lengths.__getitem__)
    return [samples[index] for index in sorted(ranked[: size // 2] + ranked[size // 2 - size :])]


def _structure(node: Any) -> Any:
    """Return the structure of a batch without its sizes; lists equal tuples, since `default_collate` makes lists."""
    kind = "sequence" if pytree.is_sequence(node) else type_name(node)
    return kind, [(step, _structure(child)) for step, child in pytree.children(node) or ()]


def apply_spec(workload: Workload, given: Mapping[str, Any], *, largest_batch: int | None = None) -> Workload:
    """Return `workload` with the values of a partial spec in place of its own, and with a way to make batches.

    Args:
        workload: The workload as it was loaded or given.
        given: A partial `TrainingSpec`; with `longest_of`, batches are made of the longest samples of the dataset.
        largest_batch: The number of samples in the largest training batch.

    Raises:
        WorkloadError: A value cannot be used, or there is neither `batch` nor `longest_of`.
    """
    workload = replace_fields(workload, **given)
    of_tokens = workload.counts_tokens and workload.dataset is not None
    if of_tokens and workload.sample_lengths is None and workload.longest_of is None:
        workload = replace_fields(workload, longest_of=TOKEN_SAMPLES)
    is_asked = workload.batch is no_batch or given.get("longest_of") is not None or of_tokens
    if workload.longest_of is not None and workload.sample_lengths is None and is_asked:
        if largest_batch is not None:
            largest_batch = max(largest_batch, workload.evaluation_batch or 0)
        return take_longest(workload, workload.longest_of, largest_batch)
    if workload.batch is no_batch:
        raise WorkloadError(
            "the workload defines no 'batch'",
            hint="write def batch(size): return a batch of that many samples; or make batches of the longest samples of"
            " the dataset with --longest-of N",
        )
    return workload


def replace_fields(workload: Workload, **settings: Any) -> Workload:
    """Return `workload` with settings other than None in place of its own; raise WorkloadError for a bad one."""
    given = {name: value for name, value in settings.items() if value is not None}
    return dataclasses.replace(workload, **given) if given else workload
