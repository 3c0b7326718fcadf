"""The temporaries of `optimizer.step()`: recorded once, then made sure of before every later one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Block = tuple[torch.device, int]
"""A device, and bytes on it."""


class TemporariesRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the storages that operators create within it, and when they die.

    Storages, not tensors, are what costs: views and in-place operators create none. Scratch memory inside one
    operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks: list[Block] = []
        self._events: list[tuple[int, bool]] = []
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, and note the storages it created."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known = {id(tensor.untyped_storage()) for tensor in _tensors((args, list(kwargs.values())))}
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if id(storage) not in known and id(storage) not in self._alive:
                self._watch(storage)
        return out

    @property
    def alive_bytes(self) -> int:
        """What the storages hold that were created within and are alive."""
        return sum(self._blocks[index][1] * (1 if born else -1) for index, born in self._events)

    def largest_set(self) -> list[Block]:
        """The blocks that were alive together when they were most, of those that are dead by now."""
        survivors = {index for index, _ in self._events} - {index for index, born in self._events if not born}
        events = [event for event in self._events if event[0] not in survivors]
        changes = (self._blocks[index][1] * (1 if born else -1) for index, born in events)
        totals = list(accumulate(changes, initial=0))
        alive: dict[int, Block] = {}
        for index, born in events[: totals.index(max(totals))]:
            if born:
                alive[index] = self._blocks[index]
            else:
                del alive[index]
        return list(alive.values())

    def _watch(self, storage: torch.UntypedStorage) -> None:
        index, key = len(self._blocks), id(storage)
        self._blocks.append((storage.device, storage.nbytes()))
        self._events.append((index, True))

        def note_death(_: Any) -> None:
            self._alive.pop(key, None)
            self._events.append((index, False))

        self._alive[key] = weakref.ref(storage, note_death)


def reserve(blocks: Iterable[Block]) -> None:
    """Allocate `blocks` together and free them, so that a caching allocator has them at hand.

    Raises:
        torch.OutOfMemoryError: Or its kin: they cannot be had.
    """
    held = [torch.empty(size, dtype=torch.uint8, device=device) for device, size in blocks]
    del held


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        if node.layout is torch.strided:
            yield node
    elif isinstance(node, list | tuple):
        for child in node:
            yield from _tensors(child)
