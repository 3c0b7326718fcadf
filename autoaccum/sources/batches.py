"""Count, split, move and join batches: any pytree of tensors, arrays, mappings, dataclasses, tuples and lists.

The batch dimension is the first one. Numbers, strings, None and tensors without dimensions belong to all samples.
Whether a sequence holds the whole batch in each entry, or one sample, is decided in `readings`.

If samples are not rows (patches of all images in one tensor, graphs with many nodes, packed tokens), the workload
counts and splits its batches by functions of its own: `Batching`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from autoaccum.checks import check_function, describe_type, read_count
from autoaccum.errors import WorkloadError, first_line
from autoaccum.sources import pytree
from autoaccum.sources.pytree import CustomBatch, map_object_tensors, map_tensors
from autoaccum.sources.readings import ANY, Readings, agree, is_samples, reading_sizes

Batch: TypeAlias = Any


@dataclass(frozen=True)
class Batching:
    """A workload's own functions to count and split batches whose samples are not rows.

    Attributes:
        split: `split(batch, sizes)` returns a list of consecutive parts with these numbers of samples.
        size: `size(batch)` returns the number of samples.
    """

    split: Callable[[Any, list[int]], Sequence[Any]]
    size: Callable[[Any], int]

    def wrap(self, batch: Batch, *_: Any) -> CustomBatch:
        """Return `batch` with its number of samples; a `CustomBatch` is returned unchanged.

        Raises:
            WorkloadError: `size` does not return a whole number. Errors of the user's code are passed on.
        """
        if isinstance(batch, CustomBatch):
            return batch
        number = read_count(self.size(batch), "size(batch)", least=0, error=WorkloadError)
        return CustomBatch(batch, number, self)

    def split_batch(self, batch: CustomBatch, sizes: Sequence[int]) -> list[CustomBatch]:
        """Return parts of `sizes` samples, which must add up; a part of 0 samples holds None.

        Raises:
            WorkloadError: `split` returns parts of other sizes.
        """
        wanted = [size for size in sizes if size]
        returned = [batch] if len(wanted) < 2 else self.split(batch.value, list(wanted))
        parts = [self.wrap(part) for part in returned] if isinstance(returned, list | tuple) else []
        if (seen := [part.samples for part in parts]) != wanted:
            raise WorkloadError(
                f"split(batch, {wanted}) returned parts of {seen} samples, as size(batch) counts them",
                hint="return a list of consecutive parts of the batch, one for each size",
            )
        following = iter(parts)
        return [next(following) if size else CustomBatch(None, 0, self) for size in sizes]


BatchReader: TypeAlias = "Batching | Readings | None"


def read_batching(split: Any, size: Any, expected: int | None = None) -> Batching | Readings:
    """Return the `Batching` of `split` and `size`; without them, new `Readings`, which expect this number of samples.

    Raises:
        WorkloadError: Only one of them is callable, or they take other arguments.
    """
    if split is None and size is None:
        return Readings(expected)
    if not (callable(split) and callable(size)):
        raise WorkloadError(
            "split and size must be two functions, and both are needed",
            hint="write both: def split(batch, sizes) and def size(batch)",
        )
    check_function(split, "split", "(batch, sizes)")
    check_function(size, "size", "(batch)")
    return Batching(split, size)


def wrap_batch(batch: Batch, batching: BatchReader, size: int | None = None, again: Any = None) -> Batch:
    """Return `batch` so that it and its parts are counted in one way (`Batching.wrap`, `Readings.wrap`)."""
    return (Readings() if batching is None else batching).wrap(batch, size, again)


def batch_size(batch: Batch) -> int:
    """Return the number of samples: the first dimension that all leaves of `batch` have in common.

    Raises:
        WorkloadError: Two leaves disagree (the message names both), nothing has a batch dimension, or an object that
            holds tensors cannot be split.
    """
    sizes = reading_sizes(batch, top=True)
    if explicit := sizes.keys() - {ANY}:
        return min(explicit, key=lambda size: (sizes[size], -size))
    if sizes:
        raise WorkloadError(
            f"batch ({describe_type(batch)}) holds nothing with a batch dimension",
            hint="give tensors whose first dimension counts the samples, or a list with one entry per sample",
        )
    raise _disagreement(batch)


def read_batch(
    batch: Batch, batching: BatchReader, size: int, maker: str, again: Any = None, *, hint: str | None = None
) -> Batch:
    """Return `wrap_batch` of a batch that `maker`, such as `batch(4)`, has made of `size` samples.

    Raises:
        WorkloadError: It has another number of samples.
    """
    wrapped = wrap_batch(batch, batching, size, again)
    if not has_size(wrapped, size):
        raise WorkloadError(
            f"{maker} returned {batch_size(wrapped)} samples", hint=hint or f"return exactly {size} samples"
        )
    return wrapped


def has_size(batch: Batch, size: int) -> bool:
    """Return whether `batch` can be read as `size` samples; lists may allow more than one reading."""
    return size in reading_sizes(batch, top=True) or batch_size(batch) == size


def split_batch(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Split `batch` into consecutive parts of `sizes` samples. Parts are views, and sizes may be 0.

    Raises:
        WorkloadError: `sizes` do not add up to the size of the batch, or the batch cannot be split.
    """
    total = sum(sizes)
    if min(sizes, default=0) < 0 or not has_size(batch, total):
        raise WorkloadError(
            f"parts of {list(sizes)} samples add up to {total}, the batch has {batch_size(batch)}",
            hint="give sizes that put every sample into exactly one part",
        )
    if isinstance(batch, CustomBatch):
        return [*batch.batching.split_batch(batch, sizes)]
    return _split(batch, total, [slice(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))], top=True)


def select_samples(batch: Batch, parts: Sequence[list[int]]) -> list[Batch]:
    """Return a batch of the samples at the indices of each part, which are copied; there must be no own `split`."""
    return _split(batch, batch_size(batch), parts, top=True)


def move_batch(batch: Batch, device: torch.device | str) -> Batch:
    """Return `batch` with every tensor on `device`. Tensors already there are kept, and aliases stay aliases.

    An object that is no container is moved by its method `to`; if it has none, it is copied with its tensors moved.
    """
    there, moved = torch.device(device), dict[int, Tensor]()

    def move(tensor: Tensor) -> Tensor:
        return moved.setdefault(id(tensor), tensor.to(there))

    def move_object(node: Any) -> Any:
        if callable(getattr(node, "to", None)):
            # A copy, since torch_geometric moves in place: the whole batch stays on the CPU.
            return copy.copy(node).to(there)
        return map_object_tensors(node, move)

    return map_tensors(batch, move, move_object)


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Join consecutive parts into one batch: the inverse of `split_batch`.

    Raises:
        WorkloadError: There are no parts, they differ in more than their number of samples, or they were made by the
            workload's own `split`, which has no inverse.
    """
    if not parts:
        raise WorkloadError("there are no parts to join", hint="give at least one")
    if isinstance(parts[0], CustomBatch):
        if len(parts) == 1:
            return parts[0]
        raise WorkloadError("parts made by split(batch, sizes) cannot be joined", hint="make one larger batch instead")
    sized = [(part, batch_size(part)) for part in parts]
    filled = [(part, size) for part, size in sized if size > 0] or sized[:1]
    return _join([part for part, _ in filled], [size for _, size in filled], "batch", top=True)


def _split(node: Any, size: int, parts: Sequence[slice | list[int]], *, top: bool = False) -> list[Any]:
    if pytree.has_batch_dimension(node) and pytree.is_leaf(node):
        return [node[part] for part in parts]
    children = pytree.children(node)
    if pytree.is_leaf(node) or children is None:
        return [node] * len(parts)
    if is_samples(node, size, top=top):
        taken = [node[part] if isinstance(part, slice) else [node[index] for index in part] for part in parts]
        return [pytree.rebuild_sequence(node, list(entries)) for entries in taken]
    columns = [_split(child, size, parts) for _, child in children]
    if all(part is child for column, (_, child) in zip(columns, children, strict=True) for part in column):
        return [node] * len(parts)
    return [pytree.rebuild(node, [column[index] for column in columns]) for index in range(len(parts))]


def _join(parts: list[Any], sizes: list[int], path: str, *, top: bool = False) -> Any:
    first = parts[0]
    if pytree.has_batch_dimension(first):
        return _concatenate(parts, path)
    children = [pytree.children(part) for part in parts]
    is_shared = all(part is first for part in parts) and not _has_rows(first)  # One batch may be given several times.
    if pytree.is_leaf(first) or children[0] is None or is_shared:
        return first
    if pytree.is_sequence(first) and all(
        is_samples(part, size, top=top) for part, size in zip(parts, sizes, strict=True)
    ):
        return pytree.rebuild_sequence(first, [entry for part in parts for entry in part])
    structures = {None if nodes is None else tuple(step for step, _ in nodes) for nodes in children}
    if len(structures) > 1:
        raise WorkloadError(f"the parts differ in the structure of {path}", hint="join parts of the same structure")
    columns = zip(*(nodes or [] for nodes in children), strict=True)
    joined = [_join([node for _, node in column], sizes, path + column[0][0]) for column in columns]
    return pytree.rebuild(first, joined)


def _has_rows(node: Any) -> bool:
    return pytree.has_batch_dimension(node) or any(_has_rows(child) for _, child in pytree.children(node) or ())


def _concatenate(parts: list[Any], path: str) -> Any:
    try:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        if len({np.shape(part)[1:] for part in parts}) == 1:
            raise  # Memory may have run out.
        raise WorkloadError(
            f"{path} of several batches cannot be joined ({first_line(error)})",
            hint="make batches that differ only in their first dimension",
        ) from None


def _lengths(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the path and length of every leaf with a batch dimension; raise for an object that cannot be split."""
    if pytree.is_leaf(node):
        if pytree.has_batch_dimension(node):
            yield path, len(node)
        return
    children = pytree.children(node)
    if children is None and pytree.contains_tensors(node):
        raise WorkloadError(
            f"{path} is {describe_type(node)}, which cannot be split into samples",
            hint="give tensors in tuples, lists, dicts or dataclasses, or write split(batch, sizes) and size(batch)",
        )
    if children and isinstance(node, list) and path != "batch" and not agree(map(reading_sizes, node)):
        yield path, len(node)
        return
    for step, child in children or ():
        yield from _lengths(child, path + step)


def _disagreement(batch: Batch) -> WorkloadError:
    lengths = dict(_lengths(batch, "batch"))
    counted = list(lengths.values())
    usual = max(counted, key=counted.count, default=0)
    odd = next((path for path, length in lengths.items() if length != usual), None)
    if odd is None:
        return WorkloadError(
            "batch cannot be split into samples", hint="give samples as the first dimension everywhere"
        )
    return WorkloadError(
        f"{odd} has the length {lengths[odd]}, {list(lengths)[counted.index(usual)]} has {usual}",
        hint="give every tensor the samples as first dimension, and put what all samples share into the model or the"
        " loss; if samples are not rows, write split(batch, sizes) and size(batch)",
    )
