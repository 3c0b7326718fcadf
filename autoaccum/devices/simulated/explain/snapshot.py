"""Snapshots of a simulated update, in the format that `torch.cuda.memory._dump_snapshot` writes.

PyTorch's memory viewer (https://pytorch.org/memory_viz) opens them. The fields are those of torch/csrc/cuda/Module.cpp
(`THCPModule_memorySnapshot`). A time is the number of the event, since nothing runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from autoaccum.devices.base import Phase
from autoaccum.devices.simulated.allocator.blocks import Block, BlockPool
from autoaccum.devices.simulated.allocator.caching_allocator import CachingAllocator
from autoaccum.devices.simulated.allocator.replay import EventReplayer
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.devices.simulated.explain.breakdown import MemoryBreakdown
from autoaccum.errors import UsageError

_FIRST_ADDRESS = 0x7F00_0000_0000
"""Where segments begin, so that their addresses look like those of a card."""


def make_snapshot(breakdown: MemoryBreakdown, capacity: int | None, settings: AllocatorSettings) -> dict[str, Any]:
    """Return the snapshot of a trace in plain containers: all its events, and the segments that are left at the end.

    The first frame of a block is the user's line, or else its purpose, named after the module and the operator that run
    there; the others are its callers. `user_metadata` is its purpose (`devices.explanation.Category`).

    Args:
        breakdown: The labelled trace.
        capacity: The bytes of the card for segments; if the trace does not fit, there is no limit.
        settings: Those of the allocator.

    Raises:
        UsageError: The settings have expandable segments, of which there is no snapshot.
    """
    if settings.expandable_segments:
        raise UsageError(
            "a snapshot (--snapshot) is made with fixed segments, and PYTORCH_CUDA_ALLOC_CONF has expandable_segments",
            hint="unset it for this command",
        )
    trace, sized = breakdown.labelled.trace, breakdown.sized
    allocator = _RecordingAllocator(capacity, settings)
    replayer = EventReplayer(allocator, sized.sizes, sized.optional, trace.streams)
    counts = []
    for event in trace.events:
        counts.append(len(allocator.entries))
        allocator.about = _describe(breakdown, event) if event >= 0 else {}
        if replayer.run((event,)) is not None:
            return make_snapshot(breakdown, None, settings)
    counts.append(len(allocator.entries))
    return {
        "segments": allocator.describe_segments(),
        "device_traces": [allocator.entries],
        "allocator_settings": _describe_settings(settings),
        "external_annotations": _annotate(trace.phases, counts),
    }


class _RecordingAllocator(CachingAllocator):
    """Keeps a record of what it does, as PyTorch's does after `_record_memory_history`.

    Attributes:
        about: Further fields of the block that is allocated next.
        entries: The record.
    """

    def __init__(self, capacity: int | None, settings: AllocatorSettings) -> None:
        super().__init__(capacity, settings)
        self.entries: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self._live: dict[Block, dict[str, Any]] = {}
        self._held: dict[int, tuple[int, BlockPool]] = {}

    def malloc(self, size: int, stream: int = 0) -> Block:
        block = super().malloc(size, stream)
        self._live[block] = self._note("alloc", block.address, size, stream)
        return block

    def free(self, block: Block) -> None:
        entry = self._live.pop(block)
        for action in ("free_requested", "free_completed"):
            self.entries.append({**entry, "action": action, "time_us": len(self.entries)})
        super().free(block)

    def describe_segments(self) -> list[dict[str, Any]]:
        """Return the segments that are left, with their blocks, in the order of their addresses."""
        free = [block for pools in self._pools.values() for pool in pools for block in pool.free_blocks()]
        starts = sorted(self._held)
        blocks: dict[int, list[dict[str, Any]]] = {start: [] for start in starts}
        for block in sorted((*self._live, *free), key=lambda one: one.address):
            start = starts[bisect_right(starts, block.address) - 1]
            blocks[start].append(self._describe_block(block))
        return [self._describe_segment(start, blocks[start]) for start in starts]

    def _describe_segment(self, start: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        size, pool = self._held[start]
        used = [block for block in blocks if block["state"] == "active_allocated"]
        allocated = sum(block["size"] for block in used)
        return {
            "device": 0,
            "address": _FIRST_ADDRESS + start,
            "total_size": size,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(block["requested_size"] for block in used),
            "stream": self._stream_of(pool),
            "segment_type": "small" if pool.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _describe_block(self, block: Block) -> dict[str, Any]:
        entry = self._live.get(block, {})
        return {
            "address": _FIRST_ADDRESS + block.address,
            "size": block.size,
            "requested_size": entry.get("size", 0),
            "state": "active_allocated" if entry else "inactive",
            "frames": entry.get("frames", []),
            "user_metadata": entry.get("user_metadata", ""),
        }

    def _alloc_block(self, pool: BlockPool, size: int) -> Block | None:
        block = super()._alloc_block(pool, size)
        if block is not None:
            self._held[block.address] = block.size, pool
            self._note("segment_alloc", block.address, block.size, self._stream_of(pool))
        return block

    def _release_block(self, block: Block) -> None:
        super()._release_block(block)
        del self._held[block.address]
        self._note("segment_free", block.address, block.size, self._stream_of(block.pool))

    def _note(self, action: str, address: int, size: int, stream: int) -> dict[str, Any]:
        entry = {
            "action": action,
            "addr": _FIRST_ADDRESS + address,
            "size": size,
            "stream": stream,
            "time_us": len(self.entries),
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": [],
            **self.about,
        }
        self.entries.append(entry)
        return entry

    def _stream_of(self, pool: BlockPool) -> int:
        return next(stream for stream, pools in self._pools.items() if pool in pools)


def _describe(breakdown: MemoryBreakdown, block: int) -> dict[str, Any]:
    labelled, use = breakdown.labelled, breakdown.uses[block]
    origin = labelled.origins[block]
    stack = labelled.stacks[origin.stack]
    path, kind = labelled.modules[use.module]
    what = " ".join(filter(None, (path or kind, origin.op))) or use.category
    first = {"filename": use.category, "line": 0, "name": what}  # facebookresearch/mosaic adds up by file and line.
    if stack:
        first |= {"filename": stack[0].filename, "line": stack[0].line}
    frames = [first, *(frame._asdict() for frame in stack)]
    return {"frames": frames, "user_metadata": use.category}


def _annotate(phases: Sequence[tuple[int, Phase]], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the phases of the step as annotations; `counts` are the entries before each event, and all."""
    ends = [*(start for start, _ in phases[1:]), len(counts) - 1]
    return [
        {"device": 0, "name": phase, "stage": stage, "time_us": counts[event]}
        for (start, phase), end in zip(phases, ends, strict=True)
        for stage, event in (("START", start), ("END", end))
    ]


def _describe_settings(settings: AllocatorSettings) -> dict[str, Any]:
    """Return the settings under the names that PyTorch gives them in a snapshot."""
    return {
        "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        "expandable_segments": False,
        "roundup_power2_divisions": {},
    }
