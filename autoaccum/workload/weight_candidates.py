"""What a loss may well divide by: countings of a batch, each with the code a user would write for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size, is_samples
from autoaccum.workload.model_loss import IGNORED, infer_divisor, label_code, label_mask
from autoaccum.workload.objective import Objective

_MARKERS = (-100, 0, -1, 1, 255)
"""Values that commonly mark what does not count: torch's ignore_index, padding ids, the void of segmentation maps."""


@dataclass(frozen=True)
class Candidate:
    """One way to count a batch.

    Attributes:
        code: An expression of `batch`.
        counts: What it gives for each of the parts it was asked about.
    """

    code: str
    counts: tuple[float, ...]

    def shares(self, start: int) -> tuple[float, ...]:
        """The shares of the parts from `start` on: candidates with equal shares cannot be told apart."""
        counts = self.counts[start:]
        return tuple(round(count / max(sum(counts), 1e-300), 12) for count in counts)


def list_candidates(batch: Any, parts: list[Any], likely: str | None = None) -> list[Candidate]:
    """Everything worth trying, the likeliest first: samples, then marked labels, masks, lengths, sums.

    Args:
        batch: The whole batch, which tells which countings exist.
        parts: The parts to count.
        likely: The code of one to try right behind samples.
    """
    leaves = dict(find_leaves(batch))
    of_parts = [dict(find_leaves(part)) for part in parts]
    shared = {path: leaf for path, leaf in leaves.items() if all(path in part for part in of_parts)}
    if not shared:
        return []
    own = isinstance(batch, pytree.CustomBatch)
    samples = "size(batch)" if own else f"len({next(iter(shared))})"
    found = [Candidate(samples, tuple(float(batch_size(part)) for part in parts))]
    ordered = sorted(shared, key=path_rank)
    for countings in (*([_rows] if own else []), _unmarked, _summed_masks, _summed, _entries):
        for path in ordered:
            for code in countings(shared[path]):
                counts = tuple(_count(code, part[path]) for part in of_parts)
                if all(value >= 0 for value in counts):
                    found.append(Candidate(code.replace("@", path), counts))
    shown = (likely or "").replace("...", ":")
    return found[:1] + sorted(found[1:], key=lambda one: one.code not in (likely, shown))


def find_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    """Tensors of a batch with rows, and sequences with an entry per sample, by the code that reaches them."""
    return _leaves(batch, "batch", batch_size(batch), top=True)


def class_weight_candidates(batch: Any, parts: list[Any], tables: Mapping[str, Tensor]) -> list[Candidate]:
    """Sums of the weights of classes: what a mean over labels divides by where classes have weights.

    Args:
        batch: The whole batch, which tells which labels exist.
        parts: The parts to count.
        tables: Weights by the code that reaches them, an entry for each class.
    """
    labels = [(path, leaf) for path, leaf in find_leaves(batch) if _is_integer(leaf)]
    of_parts = [dict(find_leaves(part)) for part in parts]
    return [
        Candidate(_looked_up(name, path, leaf), tuple(_sum_of_table(table, part[path]) for part in of_parts))
        for path, leaf in sorted(labels, key=lambda item: path_rank(item[0]))
        for name, table in tables.items()
        if leaf.numel() and int(leaf.max()) < len(table) and all(path in part for part in of_parts)
    ]


def _looked_up(name: str, path: str, labels: Tensor) -> str:
    return f"{name}[{path}].sum()" if int(labels.min()) >= 0 else f"{name}[{path}[{path} >= 0]].sum()"


def _sum_of_table(table: Tensor, labels: Tensor) -> float:
    return float(table.detach().double().to(labels.device)[labels[labels >= 0].long()].sum())


def _count(code: str, leaf: Any) -> float:
    """What an expression of `@` gives for a leaf, whose floating entries are taken as float64."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        leaf = leaf.double()
    return float(eval(code.replace("@", "leaf"), {"leaf": leaf}))


def _rows(leaf: Any) -> Iterator[str]:
    """What need not be samples where a workload counts these itself: tokens, boxes, patches."""
    if isinstance(leaf, Tensor):
        yield "len(@)"


def _unmarked(leaf: Any) -> Iterator[str]:
    if _is_integer(leaf):
        for cut in _cuts(leaf):
            for marker in _markers(leaf):
                yield f"({cut} != {marker}).sum()"


def _summed_masks(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, Tensor) and leaf.dtype == torch.bool:
        for cut in _cuts(leaf):
            yield from (f"{cut}.sum()", f"(~{cut}).sum()")


def _summed(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, Tensor) and leaf.dtype != torch.bool and not leaf.is_complex():
        for cut in _cuts(leaf):
            yield f"{cut}.sum()"
        if leaf.ndim == 1 and _is_integer(leaf):
            yield "(@ - 1).sum()"


def _entries(leaf: Any) -> Iterator[str]:
    if not isinstance(leaf, list | tuple):
        return
    if all(isinstance(entry, int | float) for entry in leaf):
        yield "sum(@)"
    elif all(pytree.has_batch_dimension(entry) for entry in leaf):
        elements = "x.numel()" if all(isinstance(entry, Tensor) for entry in leaf) else "x.size"
        yield from ("sum(len(x) for x in @)", f"sum({elements} for x in @)")


def _cuts(leaf: Tensor) -> list[str]:
    """The leaf as it is, and shifted by one along its last dimension, as language models shift their labels."""
    axes = ":, " if leaf.ndim == 2 else "..., "
    return ["@", f"@[{axes}1:]", f"@[{axes}:-1]"] if leaf.ndim > 1 else ["@"]


def _is_integer(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor) and leaf.dtype != torch.bool and not leaf.is_floating_point() and not leaf.is_complex()
    )


def _markers(leaf: Tensor) -> list[int]:
    """The common markers that occur in `leaf`, and the value its samples most often end with (padding)."""
    likely = list(_MARKERS)
    if leaf.ndim > 1 and leaf.numel() > 0:
        likely.append(int(leaf[..., -1].flatten().mode().values))
    return [marker for marker in dict.fromkeys(likely) if bool((leaf == marker).any())]


def path_rank(path: str) -> int:
    """Rank of a path: labels and targets first, the second of a pair next, then masks, then all else."""
    names = ("label", "target", "tgt", "batch[1]", "mask", "len")
    return next((rank for rank, name in enumerate(names) if name in path.lower()), len(names))


def _leaves(node: Any, path: str, size: int, *, top: bool = False) -> Iterator[tuple[str, Any]]:
    """Tensors with rows, and sequences with an entry per sample, by the code that reaches them."""
    if isinstance(node, Tensor) and pytree.has_batch_dimension(node):
        yield path, node
        return
    children = pytree.children(node)
    if children is None and callable(getattr(node, "keys", None)) and hasattr(node, "__getitem__"):
        children = [(f"[{key!r}]", node[key]) for key in node.keys()]  # noqa: SIM118  # Such as torch_geometric's.
    if pytree.is_leaf(node) or children is None:
        return
    if is_samples(node, size, top=top):
        yield path, node
        return
    for step, child in children:
        code = step if '"' in step else step.replace("'", '"')
        yield from _leaves(child, path + code, size)


def ignored_labels_warning(objective: Objective, model: nn.Module, parts: Sequence[Any]) -> str | None:
    """That parts counted by samples are likely counted wrongly, with what to write instead; None where they are not.

    Args:
        objective: The loss.
        model: The model; where it is one of transformers, its class tells whether labels are shifted.
        parts: Of one effective batch.
    """
    if objective.reduction == "sum" or objective.criterion is not None or objective.weight_function is not None:
        return None
    marked = {path for part in parts for path, leaf in find_leaves(part) if _is_marked(leaf)}
    if not marked:
        return None
    path, known = min(sorted(marked), key=path_rank), infer_divisor(model)
    divisor = f"labels != {IGNORED}" if known == "samples" else known
    labels = [dict(find_leaves(part)).get(path) for part in parts]
    kept = [label_mask(each, divisor).flatten(1).sum(1) for each in labels if isinstance(each, Tensor)]
    if known == "samples" and len(set(torch.cat(kept).tolist())) < 2:
        return None
    return (
        f"{path} has entries that do not count ({IGNORED}), and parts count by their samples, not by those that do: the"
        f" likely right weight is: def weight(batch): return {label_code(path, divisor)}"
    )


def _is_marked(leaf: Any) -> bool:
    return _is_integer(leaf) and leaf.ndim > 1 and bool((leaf == IGNORED).any())
