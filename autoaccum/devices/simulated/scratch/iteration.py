"""The order in which a reduction walks over its input: TensorIterator's dimensions, sorted and merged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """An input's dimensions as a reduction kernel sees them.

    Attributes:
        reduced: How many of them are reduced; those come first.
        shape: Sizes.
        strides: Elements from one to the next.
    """

    reduced: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class _Dimension:
    size: int
    out: int
    stride: int

    def comes_after(self, other: _Dimension) -> bool | None:
        """Whether it belongs after `other`; None when nothing decides."""
        if (self.out == 0) != (other.out == 0):
            return other.out == 0
        for mine, theirs in ((self.out, other.out), (self.stride, other.stride)):
            if mine == 0 or theirs == 0:
                continue
            if mine != theirs:
                return mine > theirs
            if self.size > other.size:
                return True
        return None

    def continues(self, inner: _Dimension) -> bool:
        """Whether walking over it goes on where `inner` ends."""
        if self.size == 1 or inner.size == 1:
            return True
        return inner.size * inner.out == self.out and inner.size * inner.stride == self.stride


def reduction_layout(shape: Sequence[int], strides: Sequence[int], reduced: Collection[int]) -> Layout:
    """Sort and merge the dimensions of an input of which `reduced` are summed into a new contiguous output.

    ATen/TensorIterator.cpp (`reorder_dimensions`, `coalesce_dimensions`).

    >>> reduction_layout((8, 128, 768), (98304, 768, 1), (0, 1))
    Layout(reduced=1, shape=(1024, 768), strides=(768, 1))
    """
    dimensions = _sorted(_dimensions(shape, strides, reduced))
    merged: list[_Dimension] = []
    for dimension in dimensions:
        if merged and dimension.continues(merged[-1]):
            last = merged[-1]
            if last.size == 1:
                last.out, last.stride = dimension.out, dimension.stride
            last.size *= dimension.size
        else:
            merged.append(dimension)
    count = sum(dimension.out == 0 for dimension in merged)
    return Layout(count, tuple(d.size for d in merged), tuple(d.stride for d in merged))


def _dimensions(shape: Sequence[int], strides: Sequence[int], reduced: Collection[int]) -> list[_Dimension]:
    """Innermost first, with the strides of the output: 0 where it is reduced."""
    dimensions, step = [], 1
    for index in reversed(range(len(shape))):
        kept = index not in reduced
        dimensions.append(_Dimension(shape[index], step if kept else 0, strides[index]))
        step *= shape[index] if kept else 1
    return dimensions


def _sorted(dimensions: list[_Dimension]) -> list[_Dimension]:
    for index in range(1, len(dimensions)):
        later = index
        for earlier in reversed(range(index)):
            after = dimensions[earlier].comes_after(dimensions[later])
            if after is None:
                continue
            if not after:
                break
            dimensions[earlier], dimensions[later] = dimensions[later], dimensions[earlier]
            later = earlier
    return dimensions
