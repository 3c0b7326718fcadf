"""Size, split, move and join a batch: any nest of tensors, arrays, mappings, dataclasses, tuples and lists.

The batch dimension is the leading one. Numbers, strings, None and tensors without dimensions belong to all samples.
A sequence is read in one of two ways, whichever agrees with the rest of the batch: as a *record*, whose entries each
hold the whole batch (`[x, y]`, as a `DataLoader` yields), or as *samples*, one entry per sample (captions, images of
unequal shape, a list of dicts). Samples are of one kind. Where both readings agree, mappings and dataclasses with
the same names, and lists of plain values, are samples; all else is a record.

Samples that are not rows (patches of all images in one tensor, graphs of many nodes, packed tokens) are counted and cut
by functions of the workload's own: `Batching`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from autoaccum.checks import describe_type, read_count
from autoaccum.errors import WorkloadError, first_line
from autoaccum.workload import pytree
from autoaccum.workload.pytree import CustomBatch, map_object_tensors, map_tensors

Batch: TypeAlias = Any

_ANY = -1
"""The size of what belongs to all samples: it agrees with every size."""


@dataclass(frozen=True)
class Batching:
    """How a workload counts and cuts batches whose samples are not rows.

    Attributes:
        split: `split(batch, sizes)`: a list of parts with so many samples each, in order.
        size: `size(batch)`: the number of its samples.
    """

    split: Callable[[Any, list[int]], Sequence[Any]]
    size: Callable[[Any], int]

    def wrap(self, batch: Batch) -> CustomBatch:
        """`batch`, counted; what is wrapped already stays as it is.

        Raises:
            WorkloadError: `size` does not return a number. What the user's code raises comes through as it is.
        """
        if isinstance(batch, CustomBatch):
            return batch
        number = read_count(self.size(batch), "size(batch)", least=0, error=WorkloadError)
        return CustomBatch(batch, number, self)

    def cut(self, batch: CustomBatch, sizes: Sequence[int]) -> list[CustomBatch]:
        """Parts of `sizes` samples, which add up; those of 0 hold None.

        Raises:
            WorkloadError: `split` returns other parts than asked for.
        """
        asked = [size for size in sizes if size]
        parts = [batch] if len(asked) < 2 else self.split(batch.value, list(asked))
        made = [self.wrap(part) for part in parts] if isinstance(parts, list | tuple) else []
        seen = [part.samples for part in made]
        if seen != asked:
            raise WorkloadError(
                f"split(batch, {asked}) returned parts of {seen} samples, as size(batch) counts them",
                hint="return a list with the next samples of the batch for each size, in order",
            )
        following = iter(made)
        return [next(following) if size else CustomBatch(None, 0, self) for size in sizes]


def read_batching(split: Any, size: Any) -> Batching | None:
    """How batches are counted and cut; None where neither function is given.

    Raises:
        WorkloadError: One of them is missing, or is no function.
    """
    if split is None and size is None:
        return None
    if not (callable(split) and callable(size)):
        raise WorkloadError(
            "split and size are functions that go together",
            hint="write both: def split(batch, sizes) and def size(batch)",
        )
    return Batching(split, size)


def wrap_batch(batch: Batch, batching: Batching | None) -> Batch:
    """`batch` as all else is to have it: wrapped where the workload counts and cuts its batches itself."""
    return batch if batching is None else batching.wrap(batch)


def batch_size(batch: Batch) -> int:
    """The number of samples: the leading dimension all of `batch` has in common.

    Raises:
        WorkloadError: Two leaves disagree (both are named), nothing has a batch dimension, or something holds tensors
            and cannot be split.
    """
    sizes = _sizes(batch, top=True)
    explicit = {size: cost for size, cost in sizes.items() if size != _ANY}
    if explicit:
        return min(explicit, key=lambda size: (explicit[size], -size))
    if sizes:
        raise WorkloadError(
            f"batch ({describe_type(batch)}) holds nothing with a batch dimension",
            hint="give tensors whose first dimension counts the samples, or a list with one entry per sample",
        )
    raise _disagreement(batch)


def has_size(batch: Batch, size: int) -> bool:
    """Whether `batch` can be read as `size` samples, where lists leave more than one reading."""
    return size in _sizes(batch, top=True) or batch_size(batch) == size


def split_batch(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cut `batch` into consecutive parts of `sizes` samples: views, nothing is copied. Sizes may be 0.

    Raises:
        WorkloadError: `sizes` do not add up to the batch's size, or the batch cannot be split.
    """
    total = sum(sizes)
    if min(sizes, default=0) < 0 or not has_size(batch, total):
        raise WorkloadError(
            f"parts of {list(sizes)} samples add up to {total}, the batch has {batch_size(batch)}",
            hint="every sample belongs to exactly one part",
        )
    if isinstance(batch, CustomBatch):
        return [*batch.batching.cut(batch, sizes)]
    bounds = list(accumulate(sizes, initial=0))
    return _split(batch, total, list(zip(bounds, bounds[1:], strict=False)), top=True)


def move_batch(batch: Batch, device: torch.device | str) -> Batch:
    """`batch` with every tensor on `device`; one tensor named twice stays one tensor. What is there already is kept.

    An object that is no container is moved by its method `to`, or else copied with its tensors moved.
    """
    there, moved = torch.device(device), dict[int, Tensor]()

    def move(tensor: Tensor) -> Tensor:
        return moved.setdefault(id(tensor), tensor.to(there))

    def move_object(node: Any) -> Any:
        if callable(getattr(node, "to", None)):
            return copy.copy(node).to(there)  # torch_geometric's moves in place, and the whole batch would stay there.
        return map_object_tensors(node, move)

    return map_tensors(batch, move, move_object)


def join_batches(parts: Sequence[Batch]) -> Batch:
    """The batch whose consecutive parts are `parts`: the inverse of `split_batch`.

    Raises:
        WorkloadError: There are no parts, or they differ in more than their number of samples, or are cut by functions
            of the workload's own, which have no inverse.
    """
    if not parts:
        raise WorkloadError("there are no parts to join", hint="give at least one")
    if isinstance(parts[0], CustomBatch):
        if len(parts) == 1:
            return parts[0]
        raise WorkloadError("batches that are cut by split(batch, sizes) cannot be joined", hint="make a larger one")
    sized = [(part, batch_size(part)) for part in parts]
    filled = [(part, size) for part, size in sized if size > 0] or sized[:1]
    return _join([part for part, _ in filled], [size for _, size in filled], "batch", top=True)


def is_samples(node: Any, size: int, *, top: bool = False) -> bool:
    """Whether `node` is a sequence with one entry per sample in a batch of `size` samples (`top`: it is the batch)."""
    if not pytree.is_sequence(node) or len(node) != size:
        return False
    record_cost, sample_cost = _reading_costs(node, top=top)
    if sample_cost is None:
        return False
    as_record = _agree([_sizes(child) for _, child in pytree.children(node) or []])
    cost = as_record.get(size, as_record.get(_ANY))
    return cost is None or sample_cost < cost + record_cost


def _sizes(node: Any, *, top: bool = False) -> dict[int, int]:
    """Every size `node` can be read as, with the cost of that reading; empty when there is none."""
    if isinstance(node, CustomBatch):
        return {node.samples: 0}
    if pytree.is_leaf(node):
        return {_rows(node): 0} if pytree.has_batch_dimension(node) else {_ANY: 0}
    children = pytree.children(node)
    if children is None:
        return {} if pytree.contains_tensors(node) else {_ANY: 0}
    as_record = _agree([_sizes(child) for _, child in children])
    if not pytree.is_sequence(node):
        return as_record
    record_cost, sample_cost = _reading_costs(node, top=top)
    sizes = {size: cost + record_cost for size, cost in as_record.items()}
    if sample_cost is not None and sample_cost < sizes.get(len(node), sample_cost + 1):
        sizes[len(node)] = sample_cost
    return sizes


def _agree(children: list[dict[int, int]]) -> dict[int, int]:
    """The sizes all children share, costs added; `_ANY` agrees with every size."""
    agreed: dict[int, int] = {_ANY: 0}
    for sizes in children:
        merged = {}
        for size in agreed.keys() | sizes.keys():
            left, right = agreed.get(size, agreed.get(_ANY)), sizes.get(size, sizes.get(_ANY))
            if left is not None and right is not None:
                merged[size] = left + right
        agreed = merged
    return agreed


def _reading_costs(node: Sequence[Any], *, top: bool) -> tuple[int, int | None]:
    """What it costs to read a sequence as a record, and as samples (None: it never is)."""
    if all(pytree.is_value(entry) for entry in node):
        if isinstance(node, tuple) and any(pytree.is_plain(entry) and not isinstance(entry, str) for entry in node):
            return 0, None  # (224, 224) is a value, not two samples
        return (3, 0) if node else (0, 1)
    if not pytree.same_structure(node) or (top and any(pytree.has_batch_dimension(entry) for entry in node)):
        return 0, None  # [x, y] as a DataLoader yields it
    if isinstance(node, list) and all(map(_is_numbers, node)) and not (top and not any(node)):
        return 3, 0  # token ids before they are padded
    if pytree.are_records(node) and not (top and isinstance(node, tuple)):
        return 2, 0
    return 0, 10 if top else 1


def _is_numbers(node: Any) -> bool:
    return isinstance(node, list) and all(isinstance(entry, int | float) for entry in node)


def _rows(leaf: Tensor | np.ndarray[Any, Any]) -> int:
    return int(leaf.shape[0])


def _split(node: Any, size: int, bounds: list[tuple[int, int]], *, top: bool = False) -> list[Any]:
    if isinstance(node, Tensor) and pytree.has_batch_dimension(node):
        return [node.narrow(0, start, stop - start) for start, stop in bounds]
    if isinstance(node, np.ndarray) and pytree.has_batch_dimension(node):
        return [node[start:stop] for start, stop in bounds]
    children = pytree.children(node)
    if pytree.is_leaf(node) or children is None:
        return [node] * len(bounds)
    if is_samples(node, size, top=top):
        return [pytree.rebuild_sequence(node, list(node[start:stop])) for start, stop in bounds]
    columns = [_split(child, size, bounds) for _, child in children]
    if all(part is child for column, (_, child) in zip(columns, children, strict=True) for part in column):
        return [node] * len(bounds)
    return [pytree.rebuild(node, [column[place] for column in columns]) for place in range(len(bounds))]


def _join(parts: list[Any], sizes: list[int], path: str, *, top: bool = False) -> Any:
    first = parts[0]
    if pytree.has_batch_dimension(first):
        return _concatenate(parts, path)
    children = [pytree.children(part) for part in parts]
    if pytree.is_leaf(first) or children[0] is None or all(part is first for part in parts):
        return first
    if pytree.is_sequence(first) and all(
        is_samples(part, size, top=top) for part, size in zip(parts, sizes, strict=True)
    ):
        return pytree.rebuild_sequence(first, [entry for part in parts for entry in part])
    steps = [step for step, _ in children[0]]
    if any(other is None or [step for step, _ in other] != steps for other in children):
        raise WorkloadError(f"the parts differ in the form of {path}", hint="join only parts of one form")
    rows = [[child for _, child in other or []] for other in children]
    joined = [
        _join(list(column), sizes, path + step) for step, column in zip(steps, zip(*rows, strict=True), strict=True)
    ]
    return pytree.rebuild(first, joined)


def _concatenate(parts: list[Any], path: str) -> Any:
    try:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise WorkloadError(
            f"{path} of several batches cannot be joined ({first_line(error)})",
            hint="only the first dimension may differ",
        ) from None


def _leaves(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Path and length of everything that has one of its own; refuses what cannot be split."""
    children = None if pytree.is_leaf(node) else pytree.children(node)
    if pytree.has_batch_dimension(node):
        yield path, _rows(node)
    elif children is None and not pytree.is_leaf(node) and pytree.contains_tensors(node):
        raise WorkloadError(
            f"{path} is {describe_type(node)}, which cannot be split into samples",
            hint="give tensors in tuples, lists, dicts or dataclasses, or write split(batch, sizes) and size(batch)",
        )
    elif (
        children and isinstance(node, list) and path != "batch" and not _agree([_sizes(child) for _, child in children])
    ):
        yield path, len(node)
        return
    for step, child in children or ():
        yield from _leaves(child, path + step)


def _disagreement(batch: Batch) -> WorkloadError:
    leaves = list(_leaves(batch, "batch"))
    lengths = [length for _, length in leaves]
    usual = max(lengths, key=lengths.count, default=0)
    odd = next((leaf for leaf in leaves if leaf[1] != usual), None)
    if odd is None:
        return WorkloadError("batch cannot be read as samples", hint="give every tensor the samples as first dimension")
    return WorkloadError(
        f"{odd[0]} has the length {odd[1]}, {leaves[lengths.index(usual)][0]} has {usual}",
        hint="the first dimension counts the samples; what belongs to all samples goes into the model or the loss, and"
        " samples that are no rows want split(batch, sizes) and size(batch)",
    )
