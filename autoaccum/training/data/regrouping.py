"""Consecutive parts of a window, joined where the join is just what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.workload import nests
from autoaccum.workload.batches import batch_size, is_samples, join_batches


def regroup(parts: Sequence[Any], sizes: Sequence[int], ceiling: int, multiple_of: int = 1) -> list[Any]:
    """`parts` of `sizes` samples, joined where that makes fewer micro-batches of at most `ceiling` of them.

    Sizes that are to be multiples are joined too where they are none.

    Joined are neighbours of the same nest, types, dtypes and trailing shapes, whose values that belong to all samples
    are equal; differently padded ones stay as they are.
    """
    runs: list[list[int]] = []
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        first = runs[-1][0] if runs else None
        if first is not None and are_joinable(parts[first], sizes[first], part, size):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [
        part for run in runs for part in _joined([parts[n] for n in run], [sizes[n] for n in run], ceiling, multiple_of)
    ]


def are_joinable(left: Any, left_size: int, right: Any, right_size: int) -> bool:
    """Whether two batches are parts of one batch."""
    return _alike(left, left_size, right, right_size, top=True)


def _joined(parts: list[Any], sizes: list[int], ceiling: int, multiple_of: int) -> list[Any]:
    total = sum(sizes)
    together, apart = (
        sum(len(split_evenly(size, ceiling, multiple_of)) for size in each) for each in ([total], filter(None, sizes))
    )
    if together == apart and not any(size % multiple_of for size in sizes):
        return parts  # A join would be a copy for nothing.
    whole = join_batches(parts)
    # Lists have more than one reading, which may change with their length.
    return [whole] if batch_size(whole) == total else parts


def _alike(left: Any, left_size: int, right: Any, right_size: int, *, top: bool = False) -> bool:
    if type(left) is not type(right) or isinstance(left, nests.OwnBatch):
        return False
    if nests.is_leaf(left):
        return _leaves_alike(left, left_size, right, right_size)
    children, others = nests.children(left), nests.children(right)
    if children is None or others is None:
        return _equal(left, right)
    if nests.is_sequence(left):
        left_reading, right_reading = is_samples(left, left_size, top=top), is_samples(right, right_size, top=top)
        if left_reading or right_reading:
            return left_reading and right_reading and nests.are_alike([*left, *right])
    return [step for step, _ in children] == [step for step, _ in others] and all(
        _alike(child, left_size, other, right_size) for (_, child), (_, other) in zip(children, others, strict=True)
    )


def _leaves_alike(left: Any, left_size: int, right: Any, right_size: int) -> bool:
    if left.dtype != right.dtype or left.ndim != right.ndim:
        return False
    if isinstance(left, Tensor) and (left.device != right.device or left.requires_grad or right.requires_grad):
        return False
    if not nests.holds_rows(left):
        return bool(torch.equal(left, right) if isinstance(left, Tensor) else np.array_equal(left, right))
    return bool(left.shape[0] == left_size and right.shape[0] == right_size and left.shape[1:] == right.shape[1:])


def _equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # a comparison of the user's own class
        return False
