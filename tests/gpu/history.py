"""The recorded requests to a card's allocator, and a replay of them by the simulated one.

The history is `torch.cuda.memory._snapshot()["device_traces"][card]`: one entry for each action, with `addr`, `size` as
it was asked for, and `stream` (torch/cuda/memory.py, `_snapshot`; c10/cuda/CUDACachingAllocator.cpp, `record_trace`).
Recording must begin before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoaccum.devices.simulated.allocator.blocks import Block
from autoaccum.devices.simulated.allocator.caching_allocator import CachingAllocator, CudaOutOfMemoryError
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings

_TAKEN, _GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_STATISTICS = {
    "allocated_bytes.all.current": "allocated_bytes",
    "allocated_bytes.all.peak": "peak_allocated_bytes",
    "reserved_bytes.all.current": "reserved_bytes",
    "reserved_bytes.all.peak": "peak_reserved_bytes",
    "num_alloc_retries": "retries",
}


@dataclass(frozen=True)
class Request:
    """One request, with the requests to CUDA that it caused.

    Attributes:
        kind: `alloc`; `oom`, one that was refused; `free`; `empty`, the cache given back by hand.
        address: Of the block; 0 where there is none.
        size: In bytes, as it was asked for.
        moved: What came from CUDA (positive) and went back (negative), in order, in bytes.
        placed: Where the segments lie that came.
    """

    kind: str
    address: int = 0
    size: int = 0
    moved: tuple[int, ...] = ()
    placed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Replayed:
    """The result of a replay: its first difference, if there is one, and its end."""

    difference: Mapping[str, Any] | None
    statistics: Mapping[str, int]
    alive: Mapping[int, int]


def translate(entries: Iterable[Mapping[str, Any]], *, retried: bool = True) -> list[Request]:
    """Requests, from the actions of one card.

    A block is freed when it can be given out again (`free_completed`): the same, unless another stream uses it. What
    CUDA is asked for belongs to the allocation, or the refusal, that follows; where neither does, or the card was only
    given memory back by then, the cache was emptied by hand.

    Args:
        entries: In order.
        retried: Whether the allocator ever gave back its cache by itself; if not, it was emptied by hand, whatever
            followed.
    """
    requests: list[Request] = []
    moved: list[int] = []
    placed: list[int] = []

    def take(request: Request | None) -> None:
        by_hand = not retried or (not placed and (request is None or request.kind != "oom"))
        given = tuple(size for size in moved if size < 0) if by_hand else ()
        if given:
            requests.append(Request("empty", moved=given))
        if request is not None:
            own = tuple(moved) if not given else tuple(size for size in moved if size > 0)
            requests.append(Request(request.kind, request.address, request.size, own, tuple(placed)))
        moved.clear()
        placed.clear()

    for entry in entries:
        action, size = entry["action"], entry["size"]
        if action in _TAKEN:
            moved.append(size)
            placed.append(entry["addr"])
        elif action in _GIVEN:
            moved.append(-size)
        elif action in ("alloc", "oom"):
            take(Request(action, entry.get("addr", 0) if action == "alloc" else 0, size))
        elif action == "free_completed":
            take(Request("free", entry["addr"], size))
    take(None)
    return requests


def replay_requests(requests: Sequence[Request], settings: AllocatorSettings, *, placed: bool) -> Replayed:
    """Ask the simulated allocator the same; ends at the first difference.

    Args:
        requests: As `translate` gives them.
        settings: Of the allocator, with the share of the card it was allowed.
        placed: Whether segments lie where the card's did, so that blocks must, too; else in the order they came, which
            is what a prediction has to assume.
    """
    addresses = (address for request in requests for address in request.placed) if placed else None
    allocator, blocks = _Watched(settings, addresses), dict[int, Block]()
    difference: dict[str, Any] | None = None
    for index, request in enumerate(requests):
        allocator.moved.clear()
        block = _ask(allocator, request, blocks)
        found = _compare(request, _moves(allocator.moved, settings), _moves(request.moved, settings), block, placed)
        if found is not None:
            difference = {"index": index, "kind": request.kind, "size": request.size, **found}
            break
    statistics = {name: getattr(allocator, ours) for name, ours in _STATISTICS.items()}
    alive = {block.address: block.size for block in blocks.values()} if placed else {}
    return Replayed(difference, statistics, alive)


def number_blocks(entries: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """Number the blocks that were allocated and freed during the record, as in a trace: events, and bytes by block.

    Blocks from before are left out.
    """
    events: list[int] = []
    sizes: list[int] = []
    alive: dict[int, int] = {}
    for entry in entries:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = len(sizes)
            events.append(len(sizes))
            sizes.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            events.append(~alive.pop(entry["addr"]))
    return events, sizes


def compare_history(record: Mapping[str, Any], settings: AllocatorSettings) -> dict[str, Any]:
    """The row of one recorded run: `exact` where every request and the end were the same at the card's addresses.

    Args:
        record: `entries`, `segments` and `statistics`, as `recorded_run` gives them.
        settings: Of the allocator.
    """
    requests = translate(record["entries"], retried=record["statistics"].get("num_alloc_retries", 0) > 0)
    at_addresses = replay_requests(requests, settings, placed=not settings.expandable_segments)
    in_order = replay_requests(requests, settings, placed=False)
    statistics = {name: [record["statistics"].get(name), at_addresses.statistics[name]] for name in _STATISTICS}
    alive = {block["address"]: block["size"] for block in _blocks_in_use(record["segments"])}
    same_end = settings.expandable_segments or at_addresses.alive == alive
    same = same_end and all(real == replayed for real, replayed in statistics.values())
    return {
        "requests": len(requests),
        "segments": sum(len(request.placed) for request in requests),
        "streams": len({entry.get("stream") for entry in record["entries"] if entry["action"] == "alloc"}),
        "exact": bool(same and at_addresses.difference is None),
        "difference": at_addresses.difference,
        "difference_in_order": in_order.difference,
        "statistics": statistics,
        "same_blocks_at_the_end": same_end,
    }


class _Watched(CachingAllocator):
    """Records its requests to CUDA; its segments lie at `addresses`."""

    def __init__(self, settings: AllocatorSettings, addresses: Iterator[int] | None) -> None:
        self.moved: list[int] = []
        self._addresses = addresses
        super().__init__(None, settings)

    def _cuda_malloc(self, size: int) -> bool:
        self.moved.append(size)
        return super()._cuda_malloc(size)

    def _cuda_free(self, size: int) -> None:
        self.moved.append(-size)
        super()._cuda_free(size)

    def _reserve_addresses(self, size: int) -> int:
        if self._addresses is None:
            return super()._reserve_addresses(size)
        # Where more segments are asked for than came: that difference is reported, not this address.
        return next(self._addresses, 0)

    def empty(self) -> None:
        """Give back what is cached."""
        self.release_cached_blocks()


def _ask(allocator: _Watched, request: Request, blocks: dict[int, Block]) -> Block | None:
    """The block that was given, if one was asked for and there was one."""
    if request.kind == "empty":
        allocator.empty()
    elif request.kind == "free":
        if request.address not in blocks:
            raise ValueError(
                f"a block at {request.address:#x} is freed that never was allocated: record from the start"
            )
        allocator.free(blocks.pop(request.address))
    else:
        try:
            block = allocator.malloc(request.size)
        except CudaOutOfMemoryError:
            return None
        blocks[request.address] = block
        return block
    return None


def _moves(moved: Sequence[int], settings: AllocatorSettings) -> list[int]:
    """In which order cached memory went back does not matter, nor by how many handles an expandable segment grew."""
    if settings.expandable_segments:
        return [sum(size for size in moved if size < 0), sum(size for size in moved if size > 0)]
    return sorted(moved)


def _compare(
    request: Request, moved: list[int], asked: list[int], block: Block | None, placed: bool
) -> dict[str, Any] | None:
    """Return the first difference."""
    if request.kind in ("alloc", "oom") and (block is None) != (request.kind == "oom"):
        return {"what": "granted", "real": request.kind == "alloc", "replayed": block is not None}
    if moved != asked:
        return {"what": "moved_bytes", "real": asked, "replayed": moved}
    if placed and block is not None and block.address != request.address:
        return {"what": "address", "real": request.address, "replayed": block.address}
    return None


def _blocks_in_use(segments: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (block for segment in segments for block in segment["blocks"] if block["state"] != "inactive")
