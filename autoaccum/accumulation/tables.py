"""A table of samples by samples on the way to a loss: each is compared with the others of its micro-batch."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from autoaccum.workload.batches import batch_size
from autoaccum.workload.nests import tensors

_NODES = 200
"""As far from the loss as a table is looked for; behind it is the model."""

_LEAST = 5
"""Fewer samples than that are too often as many as something else is."""

_VIEWS = 4
"""Of each sample at the most, in a table of all views by all views."""


def compares_samples(loss: Tensor, model: nn.Module, part: Any) -> bool:
    """Whether `loss` comes of a square of as many rows as `part` has samples, or views of them.

    A square that may have its size of something else, a dimension of a parameter or of the batch, is none. Only shapes
    are read, as autograd knows them.
    """
    samples = batch_size(part)
    if samples < _LEAST:
        return False
    known = {size for parameter in model.parameters() for size in parameter.shape}
    known |= {size for leaf in tensors(part) for size in leaf.shape[1:]}
    squares = {(samples * views,) * 2 for views in range(1, _VIEWS + 1) if samples * views not in known}
    waiting, seen = deque([loss.grad_fn]), set[Any]()
    while waiting and len(seen) < _NODES:
        node: Any = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(tuple(made.shape) in squares for made in getattr(node, "_input_metadata", ())):
            return True
        waiting.extend(after for after, _ in node.next_functions)
    return False
