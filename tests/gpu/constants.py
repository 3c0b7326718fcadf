"""Each operation on the card, block by block, beside the predictions of the rules."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tests.gpu.alignment import TENSOR, Pair, align, peak_bytes
from tests.gpu.operation import Operation
from tests.gpu.simulated_operations import Simulated

UNEXPLAINED = "unexplained"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The requests of an operation to the card's allocator: bytes by block, in order, and their peak."""

    sizes: Sequence[int]
    peak_bytes: int


def measure_operation(operation: Operation, place: torch.device) -> Measured | None:
    """Run it once under record; None on the CPU, where nothing is recorded."""
    if operation.warm:
        operation.prepare(place)()
    _forget(place)
    work = operation.prepare(place)
    if place.type == "cpu":
        work()
        return None
    torch.cuda.synchronize(place)
    torch.cuda.memory._record_memory_history(context=None, stacks="python", clear_history=True)
    try:
        kept = work()
        torch.cuda.synchronize(place)
        entries = torch.cuda.memory._snapshot()["device_traces"][place.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    events, sizes = number_blocks(entries)
    return Measured(sizes, peak_bytes(events, sizes))


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


def compare_operation(simulated: Simulated, measured: Measured | None) -> dict[str, Any]:
    """The rows of one operation: every rule of it, tensors that are not as simulated, and what nothing explains."""
    row: dict[str, Any] = {"predicted_peak_bytes": simulated.peak_bytes}
    if simulated.error is not None:
        row = {"predicted_peak_bytes": None, "not_simulated": simulated.error}
    if measured is None:
        rules = [Pair(block, None, 0) for block in simulated.blocks if block.rule != TENSOR]
        return {**row, "measured_peak_bytes": None, "rows": [_row(pair) for pair in rules]}
    pairs = align(simulated.blocks, measured.sizes)
    shown = [pair for pair in pairs if not pair.agrees or (pair.expected is not None and pair.expected.rule != TENSOR)]
    return {**row, "measured_peak_bytes": measured.peak_bytes, "rows": [_row(pair, 0) for pair in shown]}


def _row(pair: Pair, missing: int | None = None) -> Mapping[str, Any]:
    block = pair.expected
    return {
        "rule": UNEXPLAINED if block is None else block.rule,
        "numbers": [] if block is None else list(block.numbers),
        "measured_bytes": missing if pair.measured_bytes is None else pair.measured_bytes,
        "predicted_bytes": 0 if block is None else block.bytes,
        "band_bytes": 0 if block is None else block.band_bytes,
    }


def _forget(place: torch.device) -> None:
    """Give back all that is cached, the workspaces of cuBLAS too: the next product takes them anew."""
    gc.collect()
    if place.type == "cuda":
        clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
        clear()
        torch.cuda.empty_cache()
