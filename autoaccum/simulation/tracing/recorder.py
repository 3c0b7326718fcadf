"""Recorder of allocations and frees on the simulated card: the requests a real card's allocator would get."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoaccum.simulation.trace_records import (
    EMPTY_CACHE,
    EMPTY_CACHE_ONCE,
    Emptied,
    Freed,
    MemoryStep,
    OutputAllocated,
    Phase,
    Trace,
    Workspace,
)
from autoaccum.simulation.unsupported import UnsupportedError


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Collect garbage only on request, so that blocks are freed at the same place in every run.

    The threshold of 0 keeps collection off even if the workload enables it, as some do after timing a section.
    """
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was_enabled else gc.disable)()


_EMPTIES, _EMPTIES_ONCE = (Workspace("empty_cache", (size,)) for size in (EMPTY_CACHE, EMPTY_CACHE_ONCE))


class Watcher:
    """Hears of a trace while it is recorded."""

    def mark_update(self) -> None:
        """Hear that an update starts."""

    def label_next(self, phase: Phase, beside_tensors: bool, dtype: torch.dtype | None) -> None:
        """Hear that a block is allocated: for a kernel or library, or for a tensor's storage, whose dtype is given."""


Storages = Mapping[int, weakref.ref[Any]]
"""Storages by their keys, which others may have once these are gone; the references tell them apart."""
_Live = tuple[weakref.ref[Any], int, int | Workspace, torch.dtype | None]
"""A live storage, the number and size of its block (0: it was emptied, and its block freed), and its dtype."""


class Recorder:
    """Gives every new storage a block number, and records when the storage dies.

    Storages, not tensors, take memory: views and in-place operators create none.

    Attributes:
        op: The operator that is running, if known.
        phase: Returns the phase of the trial run.
        stream: The number of the stream that is current; 0 is the default stream.
        reads: How often code has read values in the current update, where all are computed.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._live: dict[int, _Live] = {}
        self._resident: set[Workspace] = set()
        self.phase: Callable[[], Phase] = _no_phase
        self._watcher = Watcher()
        self.op: Any = None
        self.stream = 0
        self._streams: dict[int, int] = {}
        self._other_streams: dict[int, int] = {}
        self.events: list[int] = []
        self.sizes: list[int | Workspace] = []
        self.phases: list[tuple[int, Phase]] = []
        self.last_update = self.reads = 0

    @property
    def live_bytes(self) -> int:
        """The bytes of all live storages."""
        return sum(size for _, _, size, _ in self._live.values() if isinstance(size, int))

    def record_outputs(self, out: Any) -> None:
        """Record the new storages among the outputs of an operator."""
        for tensor in tree_leaves(out) if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                if tensor.layout is not torch.strided:
                    layout = str(tensor.layout).removeprefix("torch.")
                    raise UnsupportedError(f"a tensor of layout {layout} is made, but only dense ones can be simulated")
                self.record_storage(tensor.untyped_storage(), tensor.dtype)

    def record_resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has another size, by `UntypedStorage.resize_`; one that was never recorded stays so."""
        live = self._live.get(id(storage))
        if live is not None:
            self.record_storage(storage, live[3])

    def record_steps(self, steps: Iterable[MemoryStep], out: Any = None) -> None:
        """Record a kernel's workspaces and outputs in the order of `steps`; those still held are freed at its end."""
        blocks: list[int] = []
        for step in steps:
            if isinstance(step, Workspace):
                blocks.append(self._allocate(step, is_workspace=True))
            elif isinstance(step, OutputAllocated):
                self.record_outputs(out if step.index is None else out[step.index])
            elif isinstance(step, Freed):
                self._free_latest(blocks, step.count)
            elif isinstance(step, Emptied):
                if step.kind not in self._resident:
                    self._resident.add(step.kind)
                    self.events.append(~self._allocate(_EMPTIES_ONCE, is_workspace=True))
            elif step.output is None:
                if step.workspace not in self._resident:
                    self._resident.add(step.workspace)
                    self._allocate(step.workspace, is_workspace=True)
            else:
                tensor = out[step.output] if isinstance(out, list | tuple) else out
                storage = tensor.untyped_storage()
                key = ~id(storage)
                self._free_ended(key)
                block = self._allocate(step.workspace)
                self._live[key] = (weakref.ref(storage, partial(self._free, key)), block, step.workspace, None)
        self._free_latest(blocks, len(blocks))

    def record_empty_cache(self, *_: Any, **__: Any) -> None:
        """Record that the allocator releases the segments that are free."""
        self.op = None
        self.record_steps([_EMPTIES])

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the number of the block that holds `tensor`; None if none was recorded."""
        live = None if tensor.layout is not torch.strided else self._live.get(id(tensor.untyped_storage()))
        return None if live is None or not live[2] else live[1]

    def live_storages(self) -> Storages:
        """Return the live storages, for `forget_all_but`."""
        return {key: live[0] for key, live in list(self._live.items())}

    def forget_all_but(self, storages: Storages) -> None:
        """Forget all other storages: a failed backward pass may never free some of them."""
        for key, ref in self.live_storages().items():
            if storages.get(key) is not ref:
                self._live.pop(key, None)

    def begin(self, phase: Callable[[], Phase], watcher: Watcher | None = None) -> None:
        """Begin a trace, which first allocates all storages that are alive."""
        live = sorted(self._live.items(), key=lambda item: item[1][1])
        self.events, self.sizes, self.phases, self.last_update, self.reads = [], [], [], 0, 0
        self.phase, self._watcher, self.op = phase, watcher or Watcher(), None
        self._resident.clear()
        self._streams, self._other_streams = {}, {}
        for key, (ref, _, size, dtype) in live:
            storage = ref()  # It lives at least as long as this takes.
            if storage is None:
                self._live.pop(key, None)
            else:
                self._live[key] = (ref, self._allocate(size, dtype) if size else -1, size, dtype)

    def mark_update(self) -> None:
        """Mark the start of an update."""
        self.last_update, self.reads = len(self.events), 0
        self._watcher.mark_update()

    def trace(self, parts: Sequence[int]) -> Trace:
        """Return the trace since `begin`; its watcher hears of no other."""
        self.phase, self._watcher = _no_phase, Watcher()
        others = self._other_streams
        return Trace(
            parts=tuple(parts),
            events=tuple(self.events),
            sizes=tuple(self.sizes),
            phases=tuple(self.phases),
            last_update=self.last_update,
            reads=self.reads,
            streams=tuple(others.get(block, 0) for block in range(len(self.sizes))) if others else (),
        )

    def _free_latest(self, blocks: list[int], count: int) -> None:
        self.events.extend(~blocks.pop() for _ in range(count))

    def record_storage(self, storage: torch.UntypedStorage, dtype: torch.dtype | None) -> None:
        """Record a storage, unless it is known with that size."""
        key, size = id(storage), storage.nbytes()
        self._free_ended(key)
        live = self._live.get(key)
        if live is not None and live[2] == size:
            return
        if size:
            dtype = dtype if live is None else live[3]
            block = self._allocate(size, dtype)
            ref = weakref.ref(storage, partial(self._free, key)) if live is None else live[0]
            self._live[key] = (ref, block, size, dtype)
        elif live is not None:
            self._live[key] = (live[0], live[1], 0, live[3])
        if live is not None and live[2]:  # Resized: the old memory is freed after the new memory is allocated.
            self.events.append(~live[1])

    def _allocate(self, size: int | Workspace, dtype: torch.dtype | None = None, *, is_workspace: bool = False) -> int:
        phase = self.phase()
        self._watcher.label_next(phase, is_workspace, dtype)
        if not self.phases or self.phases[-1][1] != phase:
            self.phases.append((len(self.events), phase))
        block = len(self.sizes)
        self.sizes.append(size)
        self.events.append(block)
        if self.stream:
            self._other_streams[block] = self._streams.setdefault(self.stream, 1 + len(self._streams))
        return block

    def _free_ended(self, key: int) -> None:
        """Free the storage of this key if it is gone and `_free` has not been called yet.

        Any thread may collect garbage, and others run between the end of an object and the call that tells of it.
        """
        live = self._live.get(key)
        if live is not None and live[0]() is None:
            self._free(key, live[0])

    def _free(self, key: int, ref: Any) -> None:
        live = self._live.get(key)
        if live is None or live[0] is not ref:  # It is forgotten, or freed already.
            return
        del self._live[key]
        if live[2]:
            self.events.append(~live[1])


def _no_phase() -> Phase:
    return "load"
