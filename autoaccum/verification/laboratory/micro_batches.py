"""The micro-batches that a loop of the user's own is given: a list that tells which one is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from autoaccum.workload import nests


class MicroBatches(list[Any]):
    """A list, however a loop goes through it; of lists that it makes itself, what the model is given tells (`called`).

    Args:
        parts: The micro-batches.
        take: Told the index of each part as it is taken.
    """

    def __init__(self, parts: Sequence[Any], take: Callable[[int], None]) -> None:
        super().__init__(parts)
        self._take = take
        self._indices = {id(part): index for index, part in enumerate(parts)}
        self._owners = {id(tensor): index for index, part in enumerate(parts) for tensor in nests.tensors(part)}
        self._parts = parts  # An id is one object's only as long as that lives.

    def called(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        """A hook before the model's forward: tells whose tensors it is given, where those are as they were."""
        given = map(id, nests.tensors((*arguments, *keywords.values())))
        found = {self._owners[tensor] for tensor in given if tensor in self._owners}
        if len(found) == 1:
            self._take(found.pop())

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while index < len(self):  # A loop may change it meanwhile, as it may any list.
            yield self[index]
            index += 1

    def __reversed__(self) -> Iterator[Any]:
        for index in range(len(self) - 1, -1, -1):
            yield self[index]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            made = MicroBatches(super().__getitem__(index), self._take)
            made._indices, made._owners, made._parts = self._indices, self._owners, self._parts
            return made
        return self._taken(super().__getitem__(index))

    def pop(self, index: Any = -1) -> Any:
        """As a list's."""
        return self._taken(super().pop(index))

    def _taken(self, part: Any) -> Any:
        if id(part) in self._indices:
            self._take(self._indices[id(part)])
        return part
