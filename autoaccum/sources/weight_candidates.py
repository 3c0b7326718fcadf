"""Candidates for `weight(batch)`: ways to count a batch, each with the code that a user would write.

Where samples are alike, all of them count the same: `shorten` makes batches of unequally long samples, in which masks,
labels, ids and lengths end earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size
from autoaccum.sources.model_loss import IGNORED, infer_divisor, label_code, label_mask
from autoaccum.sources.objective import Objective
from autoaccum.sources.readings import is_samples

_MARKERS = (-100, 0, -1, 1, 255)
"""Common values of entries to ignore: PyTorch's ignore_index, padding ids, the void class of segmentation maps."""


@dataclass(frozen=True)
class Candidate:
    """One way to count a batch.

    Attributes:
        code: An expression of `batch`.
        counts: Its value for each part.
    """

    code: str
    counts: tuple[float, ...]


def list_candidates(batch: Any, parts: list[Any]) -> list[Candidate]:
    """Return all candidates, the likeliest first: samples, labels not ignored, masks, lengths, sums.

    They are made from the whole `batch` and count its `parts`.
    """
    leaves = dict(find_leaves(batch))
    of_parts = [dict(find_leaves(part)) for part in parts]
    shared = {path: leaf for path, leaf in leaves.items() if all(path in part for part in of_parts)}
    if not shared:
        return []
    is_custom = isinstance(batch, pytree.CustomBatch)
    samples = "size(batch)" if is_custom else f"len({next(iter(shared))})"
    found = [Candidate(samples, tuple(float(batch_size(part)) for part in parts))]
    ordered = sorted(shared, key=path_rank)
    for expressions in (*([_row_counts] if is_custom else []), _label_counts, _mask_sums, _sums, _entry_sums):
        for path in ordered:
            for code in expressions(shared[path]):
                counts = tuple(_count(code, part[path]) for part in of_parts)
                if all(value >= 0 for value in counts):
                    found.append(Candidate(code.replace("@", path), counts))
    return found[:1] + sorted(found[1:], key=lambda candidate: str(IGNORED) not in candidate.code)


def find_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors with a batch dimension, and sequences with one entry per sample, with the code to access them."""
    return _leaves(batch, "batch", batch_size(batch), top=True)


def _count(code: str, leaf: Any) -> float:
    """Evaluate an expression of `@` for a leaf, in float64."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        leaf = leaf.double()
    return float(eval(code.replace("@", "leaf"), {"leaf": leaf}))


def _row_counts(leaf: Any) -> Iterator[str]:
    """Count rows that are not samples, such as tokens, boxes or patches."""
    if isinstance(leaf, Tensor):
        yield "len(@)"


def _label_counts(leaf: Any) -> Iterator[str]:
    if is_integer(leaf):
        for cut in _cuts(leaf):
            for marker in _markers(leaf):
                yield f"({cut} != {marker}).sum()"


def _mask_sums(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, Tensor) and leaf.dtype == torch.bool:
        for cut in _cuts(leaf):
            yield from (f"{cut}.sum()", f"(~{cut}).sum()")


def _sums(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, Tensor) and leaf.dtype != torch.bool and not leaf.is_complex():
        for cut in _cuts(leaf):
            yield f"{cut}.sum()"


def _entry_sums(leaf: Any) -> Iterator[str]:
    if not isinstance(leaf, list | tuple):
        return
    if all(isinstance(entry, int | float) for entry in leaf):
        yield "sum(@)"
    elif all(pytree.has_batch_dimension(entry) for entry in leaf):
        yield "sum(len(x) for x in @)"


def _cuts(leaf: Tensor) -> list[str]:
    """Return the leaf itself and its slices without the first or last entry, as language models shift their labels."""
    axes = ":, " if leaf.ndim == 2 else "..., "
    return ["@", f"@[{axes}1:]", f"@[{axes}:-1]"] if leaf.ndim > 1 else ["@"]


def is_integer(leaf: Any) -> bool:
    """Return whether `leaf` is a tensor of integers."""
    return (
        isinstance(leaf, Tensor) and leaf.dtype != torch.bool and not leaf.is_floating_point() and not leaf.is_complex()
    )


def _markers(leaf: Tensor) -> list[int]:
    """Return the common markers that occur in `leaf`, and its most frequent last value (padding)."""
    likely = list(_MARKERS)
    if leaf.ndim > 1 and leaf.numel() > 0:
        likely.append(int(leaf[..., -1].flatten().mode().values))
    return [marker for marker in dict.fromkeys(likely) if bool((leaf == marker).any())]


def path_rank(path: str) -> int:
    """Rank a path for sorting: labels and targets first, then the second of a pair, masks, and all others."""
    names = ("label", "target", "tgt", "batch[1]", "mask", "len")
    return next((rank for rank, name in enumerate(names) if name in path.lower()), len(names))


def _leaves(node: Any, path: str, size: int, *, top: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the leaves below `node` as `find_leaves` does."""
    if isinstance(node, Tensor) and pytree.has_batch_dimension(node):
        yield path, node
        return
    children = pytree.children(node)
    if children is None and callable(getattr(node, "keys", None)) and hasattr(node, "__getitem__"):
        children = [(f"[{key!r}]", node[key]) for key in node.keys()]  # noqa: SIM118  # torch_geometric's Data is such a mapping.
    if pytree.is_leaf(node) or children is None:
        return
    if is_samples(node, size, top=top):
        yield path, node
        return
    for step, child in children:
        code = step if '"' in step else step.replace("'", '"')
        yield from _leaves(child, path + code, size)


def ignored_labels_warning(objective: Objective, model: nn.Module, parts: Sequence[Any]) -> str | None:
    """Return a warning that `parts` of a batch are weighted by samples although some labels are ignored, or None."""
    if objective.reduction == "sum" or objective.criterion is not None or objective.weight_function is not None:
        return None
    labels = [(path, one) for part in parts for path, one in find_leaves(part) if is_integer(one) and one.ndim > 1]
    marked = {path for path, leaf in labels if bool((leaf == IGNORED).any())}
    if not marked:
        return None
    path, inferred = min(sorted(marked), key=path_rank), infer_divisor(model)
    divisor = f"labels != {IGNORED}" if inferred == "samples" else inferred
    found = [dict(find_leaves(part)).get(path) for part in parts]
    counted = [label_mask(each, divisor).flatten(1).sum(1) for each in found if isinstance(each, Tensor)]
    if inferred == "samples" and len(set(torch.cat(counted).tolist())) < 2:
        return None
    return (
        f"{path} has ignored entries ({IGNORED}), but parts are weighted by samples, not by the entries that count:"
        f" the likely right weight is: def weight(batch): return {label_code(path, divisor)}"
    )


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
