"""Join the outputs of parts of a batch: rows to rows, and lists that have one entry for each sample to one list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.transaction import is_plain_tensor
from autoaccum.errors import WorkloadError
from autoaccum.workload import pytree

_Place = tuple[int, ...]
"""Where a node is in a structure: the number of the child at each level."""


class OutputsJoining:
    """Joins the outputs of all parts of a batch to one structure.

    Tensors are joined along their first dimension. A tensor that belongs to no sample is the first part's: a number
    such as a learned temperature, a parameter. A list as long as its part may be samples (captions, one mask for each
    image) or a record (feature maps, two towers): samples where parts of other sizes have lists of other lengths. If
    all parts have one size, the outputs of one sample more tell, once for each list.
    """

    def __init__(self) -> None:
        self._samples: dict[_Place, bool] = {}

    def join(self, parts: Sequence[Any], sizes: Sequence[int], outputs_of: Callable[[int], Any]) -> Any:
        """Return the joined outputs of `parts` of these `sizes`; `outputs_of` runs so many samples.

        Raises:
            WorkloadError: The parts' outputs differ in structure, shape, or in a value that is no tensor; or a tensor
                has no rows for its samples.
        """
        if len(parts) == 1:
            return parts[0]
        joined = self._join(parts, sizes, cache(outputs_of), ())
        if all(_counts(part, size) for part, size in zip(parts, sizes, strict=True)):
            raise WorkloadError(
                f"an output is {sizes[0]}, the number of samples of a part, which is not that of the whole batch",
                hint="return no such number, and count samples in the loss",
            )
        return joined

    def _join(self, nodes: Sequence[Any], sizes: Sequence[int], outputs_of: Callable[[int], Any], place: _Place) -> Any:
        first = nodes[0]
        if all(isinstance(node, Tensor) for node in nodes):
            return _join_tensors(nodes, sizes)
        inner = [None if isinstance(node, Tensor) else pytree.children(node) for node in nodes]
        if inner[0] is None:
            is_equal = {repr(node) for node in nodes} == {repr(first)} and not pytree.contains_tensors(first)
            return first if is_equal or all(node is first for node in nodes) else _refuse_structure()
        if self._are_samples(nodes, sizes, outputs_of, place):
            return pytree.rebuild_sequence(first, [entry for node in nodes for entry in node])
        rows = [children or [] for children in inner]
        if {type(node) for node in nodes} != {type(first)} or any(_steps(row) != _steps(rows[0]) for row in rows):
            _refuse_structure()
        columns = zip(*([child for _, child in row] for row in rows), strict=True)
        joined = [self._join(column, sizes, outputs_of, (*place, at)) for at, column in enumerate(columns)]
        return pytree.rebuild(first, joined)

    def _are_samples(
        self, nodes: Sequence[Any], sizes: Sequence[int], outputs_of: Callable[[int], Any], place: _Place
    ) -> bool:
        """Return whether sequences with one entry for each sample of their parts are that, and not by chance."""
        pairs = zip(nodes, sizes, strict=True)
        if not all(pytree.is_sequence(node) and len(node) == size for node, size in pairs):
            return False
        if len(set(sizes)) > 1:
            return True
        if place not in self._samples:
            larger = outputs_of(sizes[0] + 1)
            for at in place:
                larger = (pytree.children(larger) or _refuse_structure())[at][1]
            if not pytree.is_sequence(larger) or len(larger) - sizes[0] not in (0, 1):
                _refuse_structure()
            self._samples[place] = len(larger) > sizes[0]
        return self._samples[place]


def _join_tensors(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    first = column[0]
    if len({(one.untyped_storage()._cdata, one.storage_offset(), one.shape) for one in column}) == 1:
        return first
    if not first.ndim:
        if any(is_plain_tensor(one) and not torch.equal(one.nan_to_num(), first.nan_to_num()) for one in column):
            raise WorkloadError(
                "an output is a number that differs between two parts of the batch",
                hint="return the rows that it is computed of, and compute it in the loss",
            )
        return first
    if any(not one.ndim or len(one) % size for one, size in zip(column, sizes, strict=True)):
        raise WorkloadError(
            f"an output of a part of {sizes[0]} samples has the shape {list(first.shape)}",
            hint="return tensors whose first dimension is the sample, or else a parameter itself",
        )
    try:
        return torch.cat([*column])
    except RuntimeError as error:
        if find_out_of_memory(error) is not None:
            raise
        raise WorkloadError(
            f"the outputs of two parts of the batch cannot be joined: {error}",
            hint="return tensors whose first dimension is the sample, and make the others equal",
        ) from None


def _refuse_structure() -> NoReturn:
    raise WorkloadError(
        "the outputs of two parts of the batch have different structures, or other values that are no tensors",
        hint="return tensors whose first dimension is the sample, and count samples in the loss",
    )


def _steps(children: list[tuple[str, Any]]) -> list[str]:
    return [step for step, _ in children]


def _counts(node: Any, size: int) -> bool:
    """Return whether a number in a structure is `size`."""
    inner = None if isinstance(node, Tensor) else pytree.children(node)
    return type(node) is int and node == size if inner is None else any(_counts(child, size) for _, child in inner)
