"""Each operation on the card, block by block, beside the predictions of the rules."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import torch

from tests.gpu.operations import Operation
from tests.gpu.simulated_operations import TENSOR, Expected, Simulated, peak_bytes

UNEXPLAINED = "unexplained"
Pair = tuple[Expected | None, int | None]
"""A block of the simulation, and the bytes of one of the card; either may be missing."""


@dataclass(frozen=True)
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


def align(expected: Sequence[Expected], measured: Sequence[int]) -> list[Pair]:
    """Pair blocks in the order of their requests: first those of equal size, then those between them.

    >>> small, large = Expected("tensor", (), 512), Expected("sort", (8,), 64)
    >>> [(block.rule, size) for block, size in align([small, large], [512, 80])]
    [('tensor', 512), ('sort', 80)]
    """
    sizes, pairs, done, taken = [block.bytes for block in expected], list[Pair](), 0, 0
    for run in SequenceMatcher(None, sizes, measured, autojunk=False).get_matching_blocks():
        pairs += _pair_up(expected[done : run.a], measured[taken : run.b])
        done, taken = run.a + run.size, run.b + run.size
        pairs += zip(expected[run.a : done], measured[run.b : taken], strict=True)
    return pairs


def _pair_up(expected: Sequence[Expected], measured: Sequence[int]) -> Iterable[Pair]:
    """Pair in order; if the card has fewer blocks, those of 0 bytes stay unpaired first, then other workspaces."""
    by_need = sorted(range(len(expected)), key=lambda at: (expected[at].bytes > 0, expected[at].rule == TENSOR))
    unpaired = by_need[: max(0, len(expected) - len(measured))]
    yield from zip_longest((block for at, block in enumerate(expected) if at not in unpaired), measured)
    yield from ((expected[at], None) for at in unpaired)


def compare_operation(simulated: Simulated, measured: Measured | None) -> dict[str, Any]:
    """The rows of one operation: every rule of it, tensors that are not as simulated, and what nothing explains."""
    row: dict[str, Any] = {"predicted_peak_bytes": simulated.peak_bytes}
    if simulated.error is not None:
        row = {"predicted_peak_bytes": None, "not_simulated": simulated.error}
    pairs: list[Pair] = [(block, None) for block in simulated.blocks if block.rule != TENSOR]
    if measured is not None:
        pairs = [(block, size or 0) for block, size in align(simulated.blocks, measured.sizes)]
    shown = [(block, size) for block, size in pairs if block is None or block.rule != TENSOR or block.bytes != size]
    peak = None if measured is None else measured.peak_bytes
    return {**row, "measured_peak_bytes": peak, "rows": [_row(*pair) for pair in shown]}


def _row(block: Expected | None, measured_bytes: int | None) -> Mapping[str, Any]:
    return {
        "rule": UNEXPLAINED if block is None else block.rule,
        "numbers": [] if block is None else list(block.numbers),
        "measured_bytes": measured_bytes,
        "predicted_bytes": 0 if block is None else block.bytes,
        "uncertainty_bytes": 0 if block is None else block.uncertainty_bytes,
    }


def _forget(place: torch.device) -> None:
    """Give back all that is cached, the workspaces of cuBLAS too: the next product takes them anew."""
    gc.collect()
    if place.type == "cuda":
        clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
        clear()
        torch.cuda.empty_cache()
