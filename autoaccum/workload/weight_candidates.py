"""Candidates for `weight(batch)`: ways to count a batch, each with the code that a user would write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size
from autoaccum.workload.model_loss import IGNORED, infer_divisor, label_code, label_mask
from autoaccum.workload.objective import Objective
from autoaccum.workload.readings import is_samples

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


def list_candidates(batch: Any, parts: list[Any], likely: str | None = None) -> list[Candidate]:
    """Return all candidates, the likeliest first: samples, labels not ignored, masks, lengths, sums.

    They are made from the whole `batch` and count its `parts`; the code `likely` is tried right after samples.
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
    shown = (likely or "").replace("...", ":")
    return found[:1] + sorted(
        found[1:], key=lambda one: (one.code not in (likely, shown), str(IGNORED) not in one.code)
    )


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
        if leaf.ndim == 1 and is_integer(leaf):
            yield "(@ - 1).sum()"


def _entry_sums(leaf: Any) -> Iterator[str]:
    if not isinstance(leaf, list | tuple):
        return
    if all(isinstance(entry, int | float) for entry in leaf):
        yield "sum(@)"
    elif all(pytree.has_batch_dimension(entry) for entry in leaf):
        elements = "x.numel()" if all(isinstance(entry, Tensor) for entry in leaf) else "x.size"
        yield from ("sum(len(x) for x in @)", f"sum({elements} for x in @)")


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
