"""The memory that a labelled trace holds at each event, by category, and its peak by category and module."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Final, NamedTuple

from autoaccum.devices.explanation import Change, Explanation, Holding, ModuleShare
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.trace_records import CATEGORIES, Category, LabelledTrace, Phase, Role, Trace
from autoaccum.sources.module_names import compact_names, mask_numbers

_STAGES: dict[Phase, int] = {"batch": 0, "forward": 1, "backward": 2}
_BACKWARD = 2
_WITHIN_RECOMPUTATION: tuple[Role, ...] = ("recomputed", "workspace")
_MAX_MODULES = 10
_ATTENTION_OPS: Final = ("_attention", "aten._softmax", "aten._safe_softmax")
"""Parts of operator names that show how attention is computed; such blocks are listed separately."""


class BlockUse(NamedTuple):
    """The category and module of a block between two events; `module` is an index in `LabelledTrace.modules`."""

    category: Category
    module: int
    allocated_at: int
    freed_at: int


class _MicroBatch(NamedTuple):
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
    allocations = [index for index, event in enumerate(trace.events) if event >= 0]  # In the blocks' order.
    frees = {~event: index for index, event in enumerate(trace.events) if event < 0}
    batches = _micro_batches(trace)
    starts = [batch.start for batch in batches]
    never = next_plain = len(trace.events)
    uses = []
    for block in reversed(range(len(allocations))):
        allocated_at, freed_at = allocations[block], frees.get(block, never)
        origin, owner = labelled.origins[block], labelled.owners.get(block)
        index = bisect_right(starts, allocated_at) - 1
        batch = batches[index] if index >= 0 and allocated_at < batches[index].end else None
        forward_end = never
        if batch is not None and allocated_at < batch.backward:
            forward_end = batch.backward
        elif origin.role == "recomputed":  # A forward within backward ends with the next allocation beside it.
            forward_end = next_plain
        if origin.role not in _WITHIN_RECOMPUTATION:
            next_plain = allocated_at
        category: Category = "temporaries"
        module = origin.module
        if owner is not None:
            category, module = owner
        elif origin.role == "workspace":
            category = "workspace"
            module = module if freed_at < never else 0
        elif batch is None:
            if index < 0 and freed_at > trace.last_update:
                category = "parameters"
        elif origin.role == "summed" and freed_at > batch.end:
            category = "gradients"
        elif freed_at > forward_end:
            category = "activations"
        uses.append(BlockUse(category, module, allocated_at, freed_at))
    return uses[::-1]


def _micro_batches(trace: Trace) -> list[_MicroBatch]:
    """Return the micro-batches of a trace in order, each with its transfer, forward and backward."""
    ends = [*(index for index, _ in trace.phases[1:]), len(trace.events)]
    found: list[_MicroBatch] = []
    last = None
    for (start, phase), end in zip(trace.phases, ends, strict=True):
        stage = _STAGES.get(phase)
        if stage is not None:
            batch = _MicroBatch(start, start, end) if last is None or stage <= last else found.pop()
            found.append(_MicroBatch(batch.start, end if stage < _BACKWARD else batch.backward, end))
        last = stage
    return found


class MemoryBreakdown:
    """Adds up the live blocks of a trace, with the sizes that they have on the card of a replayer."""

    def __init__(self, labelled: LabelledTrace, replayer: Replayer) -> None:
        self.labelled, self.replayer = labelled, replayer
        self.sized = replayer.with_sizes(labelled.trace)
        self.uses: Sequence[BlockUse] = classify_blocks(labelled)

    @property
    def peak_bytes(self) -> int:
        """The peak of the allocator without a limit."""
        return self.replayer.peak_bytes(self.labelled.trace)

    @cached_property
    def totals(self) -> Mapping[Category, Sequence[int]]:
        """Return by category the bytes that are held after each event, without `unused`."""
        steps = {category: [0] * (len(self.labelled.trace.events) + 1) for category in CATEGORIES}
        del steps["unused"]
        for use, size in zip(self.uses, self.sized.sizes, strict=True):
            steps[use.category][use.allocated_at] += size
            steps[use.category][use.freed_at] -= size
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

    def alive(self, event: int) -> list[int]:
        """Return the blocks that are alive after an event."""
        return [block for block, use in enumerate(self.uses) if use.allocated_at <= event < use.freed_at]

    def holdings(self, event: int) -> tuple[Holding, ...]:
        """Return everything held after an event, in the order of the model, first what belongs to no module.

        A holding names the operator that allocated most of it, of equal ones the first. Blocks that show how attention
        is computed are holdings of their own.
        """
        by_origin: dict[tuple[int, int, str, str], Counter[str]] = {}
        for block in self.alive(event):
            use, origin = self.uses[block], self.labelled.origins[block]
            attention = origin.op if any(part in origin.op for part in _ATTENTION_OPS) else ""
            key = use.module, CATEGORIES.index(use.category), origin.dtype, attention
            by_origin.setdefault(key, Counter())[origin.op] += self.sized.sizes[block]
        return tuple(
            Holding(
                category=CATEGORIES[category],
                module=self.labelled.modules[module].path,
                kind=self.labelled.modules[module].kind,
                dtype=dtype,
                op=max(by_op.items(), key=itemgetter(1))[0],
                bytes=by_op.total(),
            )
            for (module, category, dtype, _), by_op in sorted(by_origin.items(), key=itemgetter(0))
            if by_op.total()
        )

    def explain_peak(self, *, card: str, context_bytes: int, changes: tuple[Change, ...] = ()) -> Explanation:
        """Explain the moment at which most is held; `changes` are those that affect it."""
        at, trace = self.peak_at, self.labelled.trace
        categories: dict[Category, int] = {category: held[at] for category, held in self.totals.items()}
        categories["unused"] = self.peak_bytes - sum(categories.values())
        origin = self.labelled.origins[trace.events[at]]
        shares = module_shares(self.holdings(at))
        return Explanation(
            card=card,
            parts=trace.parts,
            peak_bytes=self.peak_bytes,
            categories=categories,
            context_bytes=context_bytes,
            phase=self.sized.phase_at(at),
            op=origin.op,
            module=self.labelled.modules[origin.module].path,
            modules=tuple(sorted(shares, key=lambda share: -share.bytes)[:_MAX_MODULES]),
            changes=changes,
        )


def module_shares(holdings: Iterable[Holding]) -> list[ModuleShare]:
    """Return the share of each module, in the order of the holdings; equal modules are one record.

    An EMA belongs to no module: it is part of the share without one, so that the shares add up.
    """
    held: dict[tuple[str, str], Counter[Category]] = {}
    for holding in holdings:
        held.setdefault((holding.module, holding.kind), Counter())[holding.category] += holding.bytes
    alike: dict[tuple[str, str, tuple[tuple[Category, int], ...]], list[str]] = {}
    for (name, kind), categories in held.items():
        alike.setdefault((mask_numbers(name), kind, tuple(categories.items())), []).append(name)
    return [
        ModuleShare(
            name=pattern,
            kind=kind,
            count=len(names),
            bytes=len(names) * sum(size for _, size in categories),
            categories={category: len(names) * size for category, size in categories},
        )
        for (_, kind, categories), group in alike.items()
        for pattern, names in compact_names(group)
    ]
