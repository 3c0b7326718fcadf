"""Storages on the card, as they come and go: what the allocator of a real one would be asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoaccum.devices.base import Phase
from autoaccum.devices.simulated.trace import Freed, MemoryStep, OutputAllocated, Trace, Workspace
from autoaccum.devices.simulated.unsupported import UnsupportedError

Witness = Callable[[Phase, bool, torch.dtype | None], None]
"""Is told the phase in which a block comes to be, whether it is memory beside tensors (of a kernel or library), and of
a tensor's storage the dtype of the first tensor it was seen with."""

_Known = tuple[weakref.ref[Any], int, int | Workspace, torch.dtype | None]
"""Of what is alive: its storage, the number and size of its block, and its dtype."""


class Recorder:
    """Numbers every storage it is shown, and notes when it dies.

    Storages, not tensors, are what costs: views and in-place operators create none.

    Attributes:
        op: The operator whose memory is noted, where that is said.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._alive: dict[int, _Known] = {}
        self._resident: dict[Workspace, int] = {}
        self._phase: Callable[[], Phase] = _no_phase
        self._witness: Witness | None = None
        self.op: Any = None
        self.events: list[int] = []
        self.sizes: list[int | Workspace] = []
        self.phases: list[tuple[int, Phase]] = []
        self.last_update = 0

    @property
    def live_bytes(self) -> int:
        """Return what the storages hold that are alive."""
        return sum(size for _, _, size, _ in self._alive.values() if isinstance(size, int))

    def record_outputs(self, out: Any) -> None:
        """Note the storages of what an operator returned."""
        for tensor in tree_leaves(out) if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                if tensor.layout is not torch.strided:
                    layout = str(tensor.layout).removeprefix("torch.")
                    raise UnsupportedError(f"a tensor of layout {layout} is made, and only dense ones are followed")
                self._see_storage(tensor)

    def take(self, steps: Iterable[MemoryStep], out: Any = None) -> None:
        """Note memory that a kernel takes, in order, between what it returns; at its end it gives back the rest."""
        blocks: list[int] = []
        for step in steps:
            if isinstance(step, Workspace):
                blocks.append(self._allocate(step, is_workspace=True))
            elif isinstance(step, OutputAllocated):
                self.record_outputs(out[step.index] if isinstance(out, list | tuple) else out)
            else:
                self._give_back(blocks, step)
        self.record_outputs(out)
        self._give_back(blocks, Freed(len(blocks)))

    def keep(self, workspace: Workspace) -> None:
        """Note memory that a library takes once and keeps, such as a workspace."""
        if workspace not in self._resident:
            self._resident[workspace] = self._allocate(workspace, is_workspace=True)

    def accompany(self, tensor: Tensor, workspace: Workspace) -> None:
        """Note memory that lives as long as the storage of `tensor`."""
        storage = tensor.untyped_storage()
        key = ~id(storage)
        self._alive[key] = (weakref.ref(storage, partial(self._free, key)), self._allocate(workspace), workspace, None)

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of the block that holds `tensor`; None where none was noted."""
        known = None if tensor.layout is not torch.strided else self._alive.get(id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def known(self) -> frozenset[int]:
        """The storages that are alive, as `forget` takes them."""
        return frozenset(self._alive)

    def forget(self, known: Collection[int]) -> None:
        """Lose sight of all storages but those: a backward pass that fails may leave some alive for good."""
        for key in self._alive.keys() - set(known):
            del self._alive[key]

    def begin(self, phase: Callable[[], Phase], witness: Witness | None = None) -> None:
        """Begin a trace with what is alive now."""
        alive = sorted(self._alive.items(), key=lambda item: item[1][1])
        self.events, self.sizes, self.phases, self.last_update = [], [], [], 0
        self._phase, self._witness, self.op = phase, witness, None
        self._resident.clear()
        for key, (ref, _, size, dtype) in alive:
            self._alive[key] = (ref, self._allocate(size, dtype), size, dtype)

    def mark_update(self) -> None:
        """An update begins."""
        self.last_update = len(self.events)

    def trace(self, parts: Sequence[int]) -> Trace:
        """Return what was noted since `begin`; nothing is asked for its phase, or told a witness, any more."""
        self._phase, self._witness = _no_phase, None
        return Trace(
            parts=tuple(parts),
            events=tuple(self.events),
            sizes=tuple(self.sizes),
            phases=tuple(self.phases),
            last_update=self.last_update,
        )

    def _give_back(self, blocks: list[int], step: Freed) -> None:
        self.events.extend(~blocks.pop() for _ in range(step.count))

    def _see_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[2] == size:
            return
        if size:
            dtype = tensor.dtype if known is None else known[3]
            block = self._allocate(size, dtype)
            self._alive[key] = (weakref.ref(storage, partial(self._free, key)), block, size, dtype)
        elif known is not None:
            del self._alive[key]
        if known is not None:  # It was resized: the old memory goes once the new one is there.
            self.events.append(~known[1])

    def _allocate(self, size: int | Workspace, dtype: torch.dtype | None = None, *, is_workspace: bool = False) -> int:
        phase = self._phase()
        if self._witness is not None:
            self._witness(phase, is_workspace, dtype)
        if not self.phases or self.phases[-1][1] != phase:
            self.phases.append((len(self.events), phase))
        block = len(self.sizes)
        self.sizes.append(size)
        self.events.append(block)
        return block

    def _free(self, key: int, _: Any) -> None:
        self.events.append(~self._alive.pop(key)[1])


def _no_phase() -> Phase:
    return "load"
