"""Batches whose samples are unequally long, made of one whose samples are alike: its masks and labels, shortened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size
from autoaccum.workload.model_loss import IGNORED
from autoaccum.workload.weight_candidates import find_leaves, is_integer, path_rank

_KEPT = 2
"""The least entries that are kept of a sample: one is left where labels are shifted."""

_SHARES = (0.2, 1.0)
"""The share of its entries that a sample keeps."""


class _Counter(NamedTuple):
    """A tensor whose entries count unless they are `ignored`: a mask, or labels.

    `is_known` is False for what may be something else, such as a tensor of ones.
    """

    path: str
    leaf: Tensor
    ignored: float
    is_known: bool

    def is_even(self, sizes: Sequence[int]) -> bool:
        """Return whether as many entries count per sample in all parts of these sizes."""
        counts = (self.leaf != self.ignored).reshape(len(self.leaf), -1).sum(1).double()
        means = [part.mean() for part in torch.split(counts, list(sizes)) if len(part)]
        return all(mean == means[0] for mean in means)


class Shortened(NamedTuple):
    """A batch with its samples shortened.

    Attributes:
        paths: The masks and labels that say which entries count.
        is_known: Whether that is certain of one of them.
        batch: The batch; None where its samples are too short already.
    """

    paths: tuple[str, ...]
    is_known: bool
    batch: Any


def shorten(batch: Any, sizes: Sequence[int], *, new_labels: bool) -> list[Shortened]:
    """Make samples of `batch` unequally long: in several ways, of which the first that runs is to be taken.

    There is none where nothing says which entries count, or parts of these `sizes` differ in all that does. With
    `new_labels`, labels may get ignored entries that have none; a loss that does not ignore these raises.
    """
    counters = _find_counters(batch, new_labels)
    if not any(counter.is_even(sizes) for counter in counters):
        return []
    sure = [counter for counter in counters if counter.is_known or counter.ignored != IGNORED]
    return [
        Shortened(tuple(one.path for one in each), any(one.is_known for one in each), _shorten(batch, each, sizes))
        for each in (counters, sure)[: 1 if len(sure) == len(counters) else 2]
    ]


def shorten_apart(batch: Any, *, new_labels: bool) -> Iterator[Any]:
    """Yield batches in which only one mask, one tensor of labels or one of padded ids ignores more entries."""
    counters = {counter.path: counter.ignored for counter in _find_counters(batch, new_labels)}
    for path, leaf in _tensors(batch):
        ignored = counters.get(path)
        if ignored is None and is_integer(leaf) and leaf.ndim > 1:
            ignored = float(leaf[..., -1].flatten().mode().values)
        if ignored is not None and not torch.equal(made := _cut(leaf, ignored, _ends(leaf != ignored)), leaf):
            yield _replaced(batch, {path: made})


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    if isinstance(batch, pytree.CustomBatch):  # Its rows are not samples.
        return []
    samples = batch_size(batch)
    return [
        (path, leaf)
        for path, leaf in find_leaves(batch)
        if isinstance(leaf, Tensor) and len(leaf) == samples and leaf.numel()
    ]


def _find_counters(batch: Any, new_labels: bool) -> list[_Counter]:
    """Find labels and masks; labels without an ignored entry only if there is a mask of their shape."""
    tensors = _tensors(batch)
    masks = {path: mask for path, leaf in tensors if (mask := _read_mask(path, leaf)) is not None}
    shapes, labels = {mask.leaf.shape for mask in masks.values() if mask.leaf.ndim > 1 and new_labels}, []
    for path, leaf in tensors:
        if path in masks or not is_integer(leaf) or not leaf.dtype.is_signed:
            continue
        is_marked = bool((leaf == IGNORED).any())
        if is_marked or (leaf.shape in shapes and path_rank(path) < path_rank("mask") and "ids" not in path):
            labels.append(_Counter(path, leaf, IGNORED, is_marked))
    return [*labels, *masks.values()]


def _read_mask(path: str, leaf: Tensor) -> _Counter | None:
    """Return a tensor of zeros and ones as a counter if it is called a mask, or its rows are those of padding masks."""
    is_named = "mask" in path.lower()
    if leaf.is_complex() or (is_integer(leaf) and not is_named and leaf.ndim < 2):  # Classes.
        return None
    if not bool(((leaf == 0) | (leaf == 1)).all()):
        return None
    ones = leaf.reshape(len(leaf), -1).bool()
    if not ones.any():  # True stands for padding.
        return _Counter(path, leaf, 1, is_named and leaf.ndim == 2) if leaf.dtype == torch.bool else None
    if not is_named and bool(((ones[:, 1:] != ones[:, :-1]).sum(1) > 1).any()):
        return None
    return _Counter(path, leaf, 0, is_named and leaf.ndim == 2)


def _shorten(batch: Any, counters: Sequence[_Counter], sizes: Sequence[int]) -> Any:
    """Return `batch` with all `counters` shortened, those of the same size alike, and ids and lengths with them.

    None where all samples are too short for that.
    """
    changed: dict[str, Tensor] = {}
    ends: dict[int, Tensor] = {}
    for path, leaf, ignored, _ in counters:
        changed[path] = _cut(leaf, ignored, ends.setdefault(leaf[0].numel(), _ends(leaf != ignored)))
    if all(counter._replace(leaf=changed[counter.path]).is_even(sizes) for counter in counters):
        return None
    for path, leaf in _tensors(batch):
        if path in changed or not is_integer(leaf):
            continue
        if leaf.ndim == 1 and "len" in path.lower() and len(ends) == 1:
            changed[path] = torch.minimum(leaf, next(iter(ends.values())).to(leaf))
        elif leaf.ndim == 2 and leaf.shape[1] in ends:
            changed[path] = _cut(leaf, _padding(leaf, counters), ends[leaf.shape[1]])
    return _replaced(batch, changed)


def _padding(ids: Tensor, counters: Sequence[_Counter]) -> float:
    """Return the value of all entries of `ids` that do not count; 0 where all count, or they differ."""
    for counter in reversed(counters):  # Masks first: labels ignore more than padding.
        if counter.leaf.shape == ids.shape and len(found := torch.unique(ids[counter.leaf == counter.ignored])) == 1:
            return float(found)
    return 0.0


def _ends(counted: Tensor) -> Tensor:
    """Return the entry of each sample from which on all are to be ignored; the first sample keeps all."""
    counted = counted.reshape(len(counted), -1)
    least, most = _SHARES
    numbers = torch.rand(len(counted), generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 1, len(counted))
    shares = most - (most - least) * numbers / 2  # The later, the shorter: any two parts differ.
    shares[0] = most
    if counted.shape[1] == 1:
        return (shares > sum(_SHARES) / 2).long()
    total = counted.sum(1).cpu()
    kept = torch.maximum((total * shares).ceil().long(), total.clamp(max=_KEPT))
    return (counted.cumsum(1).cpu() < kept[:, None]).sum(1) + 1


def _cut(leaf: Tensor, ignored: float, ends: Tensor) -> Tensor:
    """Return `leaf` with the entries from `ends` on ignored, except in samples of which nothing would be left."""
    rows = leaf.reshape(len(leaf), -1)
    made = rows.masked_fill((torch.arange(rows.shape[1]) >= ends[:, None]).to(leaf.device), ignored)
    if rows.shape[1] > 1:
        made = torch.where((made == ignored).all(1, keepdim=True), rows, made)
    return made.reshape(leaf.shape)


def _replaced(node: Any, changed: Mapping[str, Tensor], path: str = "batch") -> Any:
    """Return a batch with other tensors at these paths, as `find_leaves` names them."""
    if isinstance(node, Tensor):
        return changed.get(path, node)
    children = None if pytree.is_leaf(node) else pytree.children(node)
    if children is None:
        return node
    codes = [(step if '"' in step else step.replace("'", '"'), child) for step, child in children]
    return pytree.rebuild(node, [_replaced(child, changed, path + code) for code, child in codes])
