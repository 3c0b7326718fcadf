"""Where the samples of a batch lie in a tensor, told from its shapes in the whole batch and in the parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Samples lie along one dimension, which is [outer, samples, inner] flattened.

    How many of a sample's entries are `inner` need not be known: parts are joined, and cut, per `outer`.

    Attributes:
        dim: The dimension, from 0.
        outer: How often all samples follow each other; 1 for (B, ...), T for (T*B, ...), where time goes first.
    """

    dim: int
    outer: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of `parts`, in a memory of its own."""
        blocks = [torch.unflatten(part, self.dim, (self.outer, part.shape[self.dim] // self.outer)) for part in parts]
        return torch.cat(blocks, dim=self.dim + 1).flatten(self.dim, self.dim + 1)

    def cut(self, whole: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The parts of `whole`; `lengths` are their sizes of `dim`, each a multiple of `outer`."""
        blocks = torch.unflatten(whole, self.dim, (self.outer, whole.shape[self.dim] // self.outer))
        pieces = torch.split_with_sizes(blocks, [length // self.outer for length in lengths], dim=self.dim + 1)
        return [piece.flatten(self.dim, self.dim + 1) for piece in pieces]


def find_layouts(whole: Sequence[int], parts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Layout]:
    """Every layout that fits the shapes of one tensor in the whole batch and in its parts, the likeliest first.

    Args:
        whole: Its shape where the whole batch is run.
        parts: Its shape in each part.
        sizes: The samples of each part.

    Returns:
        `outer` 1 first: the parts' lengths need only add up, as those of ragged tokens do. Others follow where all
        lengths are the same multiple of the samples, the largest `outer` first, as time-major flattening has it.
        Empty where no dimension of samples is seen, or where several could be it (equal shapes, one part only).

    >>> find_layouts((5, 7), [(3, 7), (2, 7)], (3, 2))
    [Layout(dim=0, outer=1)]
    >>> find_layouts((20,), [(12,), (8,)], (3, 2))
    [Layout(dim=0, outer=1), Layout(dim=0, outer=4), Layout(dim=0, outer=2)]
    """
    dims = [dim for dim in range(len(whole)) if _adds_up(whole, parts, dim)]
    if len(dims) > 1:
        dims = [dim for dim in dims if [part[dim] for part in parts] == list(sizes)]
    if len(dims) != 1:
        return []
    dim = dims[0]
    each = _per_sample([part[dim] for part in parts], sizes)
    return [Layout(dim, 1), *(Layout(dim, outer) for outer in range(each, 1, -1) if each % outer == 0)]


def _adds_up(whole: Sequence[int], parts: Sequence[Sequence[int]], dim: int) -> bool:
    """Whether the lengths of `dim` add up to the whole's, and all else is alike."""
    if any(len(part) != len(whole) for part in parts) or sum(part[dim] for part in parts) != whole[dim]:
        return False
    return all([*part[:dim], *part[dim + 1 :]] == [*whole[:dim], *whole[dim + 1 :]] for part in parts)


def _per_sample(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """How many entries each sample has, where that is one number; else 1."""
    each = {length // size for length, size in zip(lengths, sizes, strict=True) if size and length % size == 0}
    fits = len(each) == 1 and all(size and length % size == 0 for length, size in zip(lengths, sizes, strict=True))
    return each.pop() if fits else 1
