"""Candidates for `weight(batch)`: ways to count a batch, each as the code that a user would write.

Where samples are alike, all of them count the same: `shorten` makes batches of unequally long samples, in which masks,
labels, ids and lengths end earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoaccum.messages import Message, message
from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size
from autoaccum.sources.model_loss import IGNORED, CountedLabels, infer_divisor
from autoaccum.sources.objective import Objective
from autoaccum.sources.readings import is_samples

_MARKERS = (-100, 0, -1, 1, 255)
"""Common values of entries to ignore: PyTorch's ignore_index, padding ids, the void class of segmentation maps."""


def list_candidates(batch: Any, parts: Sequence[Any]) -> dict[str, tuple[float, ...]]:
    """Return expressions of `batch` with their values for its `parts`, the likeliest first.

    They count samples, labels that are not ignored, rows that are not samples, masks, sums and lengths.
    """
    of_parts = [dict(find_leaves(part)) for part in parts]
    leaves = {path: leaf for path, leaf in find_leaves(batch) if all(path in part for part in of_parts)}
    if not leaves:
        return {}
    is_custom = isinstance(batch, pytree.CustomBatch)
    samples = "size(batch)" if is_custom else f"len({next(iter(leaves))})"
    counted = {samples: tuple(float(batch_size(part)) for part in parts)}
    ways = [
        (rank, path_rank(path), path, code)
        for path, leaf in leaves.items()
        for rank, code in _expressions(leaf, is_custom)
    ]
    for *_, path, code in sorted(ways, key=itemgetter(0, 1)):
        counts = tuple(_evaluate(code, part[path]) for part in of_parts)
        if min(counts) >= 0:
            counted.setdefault(code.replace("@", path), counts)
    return counted


def find_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors with a batch dimension, and sequences with one entry per sample, with the code to access them."""
    size = batch_size(batch)

    def leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, Tensor) and pytree.has_batch_dimension(node):
            yield path, node
            return
        children = pytree.children(node)
        if children is None and callable(getattr(node, "keys", None)) and hasattr(node, "__getitem__"):
            children = [(f"[{key!r}]", node[key]) for key in node.keys()]  # noqa: SIM118  # As torch_geometric's Data.
        if pytree.is_leaf(node) or children is None:
            return
        if is_samples(node, size, top=path == "batch"):
            yield path, node
            return
        for step, child in children:
            yield from leaves(child, path + _code(step))

    return leaves(batch, "batch")


def _code(step: str) -> str:
    return step if '"' in step else step.replace("'", '"')


def _expressions(leaf: Any, is_custom: bool) -> Iterator[tuple[int, str]]:
    """Yield expressions of a leaf `@`, each with its rank; tensors also without the first or last entry of a row.

    Language models shift their labels in this way.
    """
    if not isinstance(leaf, Tensor):
        if all(isinstance(entry, int | float) for entry in leaf):
            yield 5, "sum(@)"
        elif all(pytree.has_batch_dimension(entry) for entry in leaf):
            yield 5, "sum(len(x) for x in @)"
        return
    if is_custom:
        yield 1, "len(@)"
    if leaf.is_complex():
        return
    axes = ":, " if leaf.ndim == 2 else "..., "
    for cut in ["@", f"@[{axes}1:]", f"@[{axes}:-1]"] if leaf.ndim > 1 else ["@"]:
        if leaf.dtype == torch.bool:
            yield from ((3, f"{cut}.sum()"), (3, f"(~{cut}).sum()"))
            continue
        for marker in _markers(leaf) if is_integer(leaf) else ():
            yield 0 if marker == IGNORED else 2, f"({cut} != {marker}).sum()"
        yield 4, f"{cut}.sum()"


def _evaluate(code: str, leaf: Any) -> float:
    """Evaluate an expression of `@` for a leaf, in float64."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        leaf = leaf.double()
    return float(eval(code.replace("@", "leaf"), {"leaf": leaf}))


def is_integer(leaf: Any) -> bool:
    """Return whether `leaf` is a tensor of integers."""
    is_number = isinstance(leaf, Tensor) and leaf.dtype != torch.bool
    return is_number and not leaf.is_floating_point() and not leaf.is_complex()


def _markers(leaf: Tensor) -> list[int]:
    """Return the common markers that occur in `leaf`, and its most frequent last value (padding)."""
    padding = [int(leaf[..., -1].flatten().mode().values)] if leaf.ndim > 1 and leaf.numel() else []
    return [marker for marker in dict.fromkeys([*_MARKERS, *padding]) if bool((leaf == marker).any())]


def path_rank(path: str) -> int:
    """Rank a path for sorting: labels and targets first, then the second of a pair, masks, and all others."""
    names = ("label", "target", "tgt", "batch[1]", "mask", "len")
    return next((rank for rank, name in enumerate(names) if name in path.lower()), len(names))


def ignored_labels_warning(objective: Objective, model: nn.Module, parts: Sequence[Any]) -> Message | None:
    """Return a warning that `parts` of a batch are weighted by samples although some labels are ignored, or None."""
    is_known = objective.weight_function is not None or objective.criterion is not None or objective.assumes_divisor
    if is_known or objective.reduction == "sum":
        return None
    labels = [(path, leaf) for part in parts for path, leaf in find_leaves(part) if is_integer(leaf) and leaf.ndim > 1]
    marked = {path for path, leaf in labels if bool((leaf == IGNORED).any())}
    if not marked:
        return None
    path, inferred = min(sorted(marked), key=path_rank), infer_divisor(model)
    counted = inferred or CountedLabels()
    counts = torch.cat([counted.mask(leaf).flatten(1).sum(1) for place, leaf in labels if place == path])
    if inferred is None and len(set(counts.tolist())) < 2:
        return None
    return message("labels_ignored", labels=path, code=f"({counted.expression(path)}).sum()")


_KEPT = 2
"""The least entries that are kept of a sample: one is left where labels are shifted."""

_SHARES = (1.0, 0.2)
"""The share of their entries that the first and the last sample keep."""


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
        return len({float(part.mean()) for part in torch.split(counts, list(sizes)) if len(part)}) == 1


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


def shorten(batch: Any, sizes: Sequence[int], *, new_labels: bool, apart: bool = False) -> list[Shortened]:
    """Make samples of `batch` unequally long: in several ways, of which the first that runs is to be taken.

    There is none where nothing says which entries count, or parts of these `sizes` differ in all that does.

    Args:
        batch: The batch.
        sizes: Samples in each part.
        new_labels: Whether labels may get ignored entries that have none; a loss that does not ignore these raises.
        apart: Whether no two of labels, masks and ids are to count alike; parts may then differ already.
    """
    if isinstance(batch, pytree.CustomBatch):  # Its rows are not samples.
        return []
    leaves = {path: leaf for path, leaf in find_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel()}
    tensors = {path: leaf for path, leaf in leaves.items() if len(leaf) == batch_size(batch)}
    counters = _find_counters(tensors, new_labels)
    if not counters or not (apart or any(counter.is_even(sizes) for counter in counters)):
        return []
    sure = [counter for counter in counters if counter.is_known or counter.ignored != IGNORED]
    ways = []
    for used in [counters] if len(sure) == len(counters) else [counters, sure]:
        changed = _shorten(tensors, used, apart)
        is_even = all(counter._replace(leaf=changed[counter.path]).is_even(sizes) for counter in used)
        paths, is_known = tuple(counter.path for counter in used), any(counter.is_known for counter in used)
        ways.append(Shortened(paths, is_known, None if is_even else _replaced(batch, changed)))
    return ways


def _find_counters(tensors: Mapping[str, Tensor], new_labels: bool) -> list[_Counter]:
    """Find labels and masks; labels without an ignored entry only if there is a mask of their shape."""
    masks = {path: mask for path, leaf in tensors.items() if (mask := _read_mask(path, leaf)) is not None}
    shapes, labels = {mask.leaf.shape for mask in masks.values() if mask.leaf.ndim > 1 and new_labels}, []
    for path, leaf in tensors.items():
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


def _shorten(tensors: Mapping[str, Tensor], counters: Sequence[_Counter], apart: bool) -> dict[str, Tensor]:
    """Return by path all `counters` shortened, and ids and lengths with them: those of the same size alike.

    Or each in another way, where counts are to be told `apart`.
    """
    changed: dict[str, Tensor] = {}
    ends: dict[int, Tensor] = {}

    def cut(path: str, leaf: Tensor, ignored: float) -> None:
        length = leaf[0].numel()
        if apart or length not in ends:
            ends[length] = _ends(leaf != ignored, turn=len(changed) if apart else 0)
        changed[path] = _cut(leaf, ignored, ends[length])

    for path, leaf, ignored, _ in counters:
        cut(path, leaf, ignored)
    for path, leaf in tensors.items():
        if path in changed or not is_integer(leaf):
            continue
        if leaf.ndim == 1 and "len" in path.lower() and len(ends) == 1:
            changed[path] = torch.minimum(leaf, next(iter(ends.values())).to(leaf))
        elif leaf.ndim == 2 and leaf.shape[1] in ends:
            cut(path, leaf, _padding(leaf, counters))
    return changed


def _padding(ids: Tensor, counters: Sequence[_Counter]) -> float:
    """Return the value of all entries of `ids` that do not count; 0 where all count, or they differ."""
    for counter in reversed(counters):  # Masks first: labels ignore more than padding.
        if counter.leaf.shape == ids.shape and len(fill := torch.unique(ids[counter.leaf == counter.ignored])) == 1:
            return float(fill)
    return 0.0


def _ends(counted: Tensor, turn: int) -> Tensor:
    """Return the entry of each sample from which on all are to be ignored.

    The later the sample, the shorter; with each `turn`, the longest is a third further on.
    """
    counted = counted.reshape(len(counted), -1).cpu()
    shares = torch.linspace(*_SHARES, len(counted)).roll(turn * max(len(counted) // 3, 1))
    if counted.shape[1] == 1:
        return (shares > sum(_SHARES) / 2).long()
    total = counted.sum(1)
    kept = torch.maximum((total * shares).ceil().long(), total.clamp(max=_KEPT))
    return (counted.cumsum(1) < kept[:, None]).sum(1) + 1


def _cut(leaf: Tensor, ignored: float, ends: Tensor) -> Tensor:
    """Return `leaf` with the entries from `ends` on ignored, except in samples of which nothing would be left."""
    rows = leaf.reshape(len(leaf), -1)
    cut = rows.masked_fill((torch.arange(rows.shape[1]) >= ends[:, None]).to(leaf.device), ignored)
    if rows.shape[1] > 1:
        cut = torch.where((cut == ignored).all(1, keepdim=True), rows, cut)
    return cut.reshape(leaf.shape)


def _replaced(node: Any, changed: Mapping[str, Tensor], path: str = "batch") -> Any:
    """Return a batch with other tensors at these paths, as `find_leaves` names them."""
    if isinstance(node, Tensor):
        return changed.get(path, node)
    children = None if pytree.is_leaf(node) else pytree.children(node)
    if children is None:
        return node
    return pytree.rebuild(node, [_replaced(child, changed, path + _code(step)) for step, child in children])
