"""The memory that a labelled trace holds at each event, by category, and its peak by category and module."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Final, NamedTuple

from autoaccum.devices.explanation import Explanation, Holding, ModuleShare
from autoaccum.simulation.allocator.replay import SizedTrace
from autoaccum.simulation.trace_records import CATEGORIES, Category, LabelledTrace, Phase, Role, Trace
from autoaccum.sources.module_names import compact_names, mask_numbers

_STAGES: dict[Phase, int] = {"batch": 0, "forward": 1, "backward": 2}
_BACKWARD = 2
_WITHIN_RECOMPUTATION: tuple[Role, ...] = ("recomputed", "workspace")
_MAX_MODULES = 10
"""The path of an entry of a list, such as `encoder.layer.3`."""
_ATTENTION_OPS: Final = ("_attention", "aten._softmax", "aten._safe_softmax")
"""Parts of operator names that show how attention is computed; such blocks are listed separately."""


@dataclass(frozen=True)
class BlockUse:
    """The category and module of a block between two events; `module` is an index in `LabelledTrace.modules`."""

    category: Category
    module: int
    allocated_at: int
    freed_at: int


class MicroBatch(NamedTuple):
    """The events of one micro-batch: inputs and forward from `start`, backward from `backward` to before `end`."""

    start: int
    backward: int
    end: int


def classify_blocks(labelled: LabelledTrace) -> list[BlockUse]:
    """Return the use of each block: that of its owner, or else what follows from its lifetime.

    An activation outlives the forward pass in which it was allocated, of a micro-batch or within backward. An
    accumulated gradient outlives its micro-batch and was allocated where autograd hands over a gradient. A block that
    was there before the first micro-batch and stays, such as a constant on the card, counts as parameters. A workspace
    that stays belongs to no module.
    """
    trace = labelled.trace
    lives = _lives(trace)
    batches = micro_batches(trace)
    starts = [batch.start for batch in batches]
    recomputation_ends = _ends_of_recomputation(labelled, [allocated_at for allocated_at, _ in lives])
    found = []
    for block, (allocated_at, freed_at) in enumerate(lives):
        origin, owner = labelled.origins[block], labelled.owners.get(block)
        if owner is not None:
            found.append(BlockUse(owner.category, owner.module, allocated_at, freed_at))
            continue
        index = bisect_right(starts, allocated_at) - 1
        batch = batches[index] if index >= 0 and allocated_at < batches[index].end else None
        category: Category = "temporaries"
        module = origin.module
        if origin.role == "workspace":
            category = "workspace"
            module = module if freed_at < len(trace.events) else 0
        elif batch is None:
            if index < 0 and freed_at > trace.last_update:
                category = "parameters"
        elif origin.role == "summed" and freed_at > batch.end:
            category = "gradients"
        elif freed_at > (batch.backward if allocated_at < batch.backward else recomputation_ends[block]):
            category = "activations"
        found.append(BlockUse(category, module, allocated_at, freed_at))
    return found


def micro_batches(trace: Trace) -> list[MicroBatch]:
    """Return the micro-batches of a trace in order, each with its transfer, forward and backward."""
    ends = [*(index for index, _ in trace.phases[1:]), len(trace.events)]
    found: list[MicroBatch] = []
    last = None
    for (start, phase), end in zip(trace.phases, ends, strict=True):
        stage = _STAGES.get(phase)
        if stage is not None:
            batch = MicroBatch(start, start, end) if last is None or stage <= last else found.pop()
            found.append(MicroBatch(batch.start, end if stage < _BACKWARD else batch.backward, end))
        last = stage
    return found


def _lives(trace: Trace) -> list[tuple[int, int]]:
    """Return for each block the indices of the events that allocate and free it."""
    allocated_at, freed_at = [0] * len(trace.sizes), [len(trace.events)] * len(trace.sizes)
    for index, event in enumerate(trace.events):
        if event >= 0:
            allocated_at[event] = index
        else:
            freed_at[~event] = index
    return list(zip(allocated_at, freed_at, strict=True))


def _ends_of_recomputation(labelled: LabelledTrace, allocated_at: Sequence[int]) -> list[int]:
    """Return for each block of a forward within backward the next allocation after that forward.

    For other blocks it is the end of the trace.
    """
    never = len(labelled.trace.events)
    ends, end = [never] * len(allocated_at), never
    for block in range(len(allocated_at) - 1, -1, -1):
        role = labelled.origins[block].role
        if role == "recomputed":
            ends[block] = end
        elif role not in _WITHIN_RECOMPUTATION:
            end = allocated_at[block]
    return ends


class MemoryBreakdown:
    """Adds up the live blocks of a trace."""

    def __init__(self, labelled: LabelledTrace, sized: SizedTrace) -> None:
        self.labelled, self.sized = labelled, sized
        self.uses: Sequence[BlockUse] = classify_blocks(labelled)

    @cached_property
    def totals(self) -> Mapping[Category, Sequence[int]]:
        """Return by category the bytes that are held after each event, without `unused`."""
        steps = {category: [0] * (len(self.labelled.trace.events) + 1) for category in CATEGORIES}
        del steps["unused"]
        for use, size in zip(self.uses, self.sized.sizes, strict=True):
            own = steps[use.category]
            own[use.allocated_at] += size
            own[use.freed_at] -= size
        return {category: list(accumulate(step[:-1])) for category, step in steps.items()}

    @cached_property
    def held_bytes(self) -> Sequence[int]:
        """Return the bytes that are held after each event."""
        return [sum(held) for held in zip(*self.totals.values(), strict=True)]

    @cached_property
    def peak_at(self) -> int:
        """Return the event at which most is held (a request for memory; the last of equal ones)."""
        held, sizes = self.held_bytes, self.sized.sizes
        requests = (
            at for at, event in enumerate(self.labelled.trace.events) if event >= 0 and (sizes[event] or not held[at])
        )
        return max(requests, key=lambda at: (held[at], at))

    def alive(self, event: int) -> list[tuple[int, Category]]:
        """Return the blocks that are alive after an event, with their categories."""
        return [
            (block, use.category) for block, use in enumerate(self.uses) if use.allocated_at <= event < use.freed_at
        ]


def module_shares(breakdown: MemoryBreakdown, event: int) -> list[ModuleShare]:
    """Return the share of each module after an event, in the order of the model; equal modules are one record.

    An EMA belongs to no module: it is part of the share without one, so that the shares add up.
    """
    found: dict[int, Counter[Category]] = {}
    for block, category in breakdown.alive(event):
        found.setdefault(breakdown.uses[block].module, Counter())[category] += breakdown.sized.sizes[block]
    unnamed: list[ModuleShare] = []
    alike: dict[tuple[object, ...], list[str]] = {}
    shares: dict[str, ModuleShare] = {}
    for module, held in sorted(found.items()):
        name, kind = breakdown.labelled.modules[module]
        categories = {category: held[category] for category in CATEGORIES if held[category]}
        if not categories:
            continue
        share = ModuleShare(name=name, kind=kind, count=1, bytes=held.total(), categories=categories)
        if name:
            shares[name] = share
            alike.setdefault((mask_numbers(name), kind, *categories.items()), []).append(name)
        else:
            unnamed.append(share)
    groups = (group for names in alike.values() for group in compact_names(names))
    return [*unnamed, *(_multiply(shares[of[0]], name, len(of)) for name, of in groups)]


def largest_shares(shares: Iterable[ModuleShare], most: int = _MAX_MODULES) -> tuple[ModuleShare, ...]:
    """Return the largest shares, in descending order."""
    return tuple(sorted(shares, key=lambda share: -share.bytes)[:most])


def _multiply(share: ModuleShare, name: str, count: int) -> ModuleShare:
    categories = {category: held * count for category, held in share.categories.items()}
    return replace(share, name=name, count=count, bytes=share.bytes * count, categories=categories)


def holdings_at(breakdown: MemoryBreakdown, event: int) -> tuple[Holding, ...]:
    """Return everything held after an event, in the order of the model, first what belongs to no module.

    A holding names the operator that allocated most of it, of equal ones the first. Blocks that show how attention is
    computed are holdings of their own.
    """
    labelled, sizes = breakdown.labelled, breakdown.sized.sizes
    made: dict[tuple[int, int, str, str], Counter[str]] = {}
    for block, category in breakdown.alive(event):
        origin = labelled.origins[block]
        apart = origin.op if any(part in origin.op for part in _ATTENTION_OPS) else ""
        key = breakdown.uses[block].module, CATEGORIES.index(category), origin.dtype, apart
        made.setdefault(key, Counter())[origin.op] += sizes[block]
    return tuple(
        Holding(
            category=CATEGORIES[category],
            module=labelled.modules[module].path,
            kind=labelled.modules[module].kind,
            dtype=dtype,
            op=max(by_op.items(), key=itemgetter(1))[0],
            bytes=by_op.total(),
        )
        for (module, category, dtype, _), by_op in sorted(made.items(), key=itemgetter(0))
        if by_op.total()
    )


def explain_peak(breakdown: MemoryBreakdown, *, card: str, peak_bytes: int, context_bytes: int) -> Explanation:
    """Explain the moment at which most is held; suggested changes are added later."""
    at, trace = breakdown.peak_at, breakdown.labelled.trace
    categories: dict[Category, int] = {category: held[at] for category, held in breakdown.totals.items()}
    categories["unused"] = peak_bytes - sum(categories.values())
    origin = breakdown.labelled.origins[trace.events[at]]
    return Explanation(
        card=card,
        parts=trace.parts,
        peak_bytes=peak_bytes,
        categories=categories,
        context_bytes=context_bytes,
        phase=breakdown.sized.phase_at(at),
        op=origin.op,
        module=breakdown.labelled.modules[origin.module].path,
        modules=largest_shares(module_shares(breakdown, at)),
    )
