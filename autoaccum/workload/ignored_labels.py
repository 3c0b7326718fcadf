"""Labels that do not count, in a batch whose loss has no weight: a mean over the others is not one over samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from autoaccum.workload.candidates import find_leaves, unlikeliness
from autoaccum.workload.own_loss import IGNORED, find_divisor, keep_labels, label_code
from autoaccum.workload.weights import Objective


def ignored_labels_warning(objective: Objective, model: nn.Module, parts: Sequence[Any]) -> str | None:
    """That parts counted by samples are likely counted wrongly, with what to write instead; None where they are not.

    Args:
        objective: The loss.
        model: The model; where it is one of transformers, its class tells whether labels are shifted.
        parts: Of one effective batch.
    """
    if objective.reduction == "sum" or objective.criterion is not None or objective.weight_function is not None:
        return None
    path = _find_path(parts)
    if path is None:
        return None
    known = find_divisor(model)
    divisor = f"labels != {IGNORED}" if known == "samples" else known
    counts = [count for part in parts for count in _counts(dict(find_leaves(part)).get(path), divisor)]
    if len(set(counts)) < 2 and known == "samples":
        return None
    return (
        f"{path} has entries that do not count ({IGNORED}), and parts count by their samples, not by those that do: the"
        f" likely right weight is: def weight(batch): return {label_code(path, divisor)}"
    )


def _find_path(parts: Sequence[Any]) -> str | None:
    found = {path for part in parts for path, leaf in find_leaves(part) if _is_marked(leaf)}
    return min(sorted(found), key=unlikeliness, default=None)


def _is_marked(leaf: Any) -> bool:
    whole = isinstance(leaf, Tensor) and leaf.ndim > 1 and not leaf.is_floating_point() and not leaf.is_complex()
    return whole and bool((leaf == IGNORED).any())


def _counts(labels: Any, divisor: str) -> list[int]:
    """What counts of each sample."""
    if not isinstance(labels, Tensor):
        return []
    counts: list[int] = keep_labels(labels, divisor).flatten(1).sum(1).tolist()
    return counts
