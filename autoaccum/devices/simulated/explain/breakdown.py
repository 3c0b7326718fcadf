"""The memory a labelled trace holds at every event, by what it is for, and its peak by category and by module."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Final, NamedTuple, get_args

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES, Category, Explanation, Holding, ModuleShare, Moment
from autoaccum.devices.simulated.allocator.replay import SizedTrace
from autoaccum.devices.simulated.trace import LabelledTrace, Role, Trace
from autoaccum.workload.module_names import distinct_names, mask_numbers

_STAGES: dict[Phase, int] = {"batch": 0, "forward": 1, "backward": 2}
_BACKWARD = 2
_AGAIN: tuple[Role, ...] = ("recomputed", "workspace")


@dataclass(frozen=True)
class BlockUse:
    """The purpose of a block between two events; `module` is an index in `LabelledTrace.modules`."""

    category: Category
    module: int
    born: int
    died: int


class MicroBatch(NamedTuple):
    """Events of one micro-batch: those of its forward, with its inputs, end where `backward` begins; `end` is past."""

    start: int
    backward: int
    end: int


def classify_blocks(labelled: LabelledTrace) -> list[BlockUse]:
    """By block: who owns it, or else what it did.

    An activation is what outlives the forward it was made in, be it that of a micro-batch or one within backward. What
    a gradient is added up in outlives its micro-batch, and was made where autograd hands over a gradient. What was
    there before the first micro-batch and stays counts as parameters: a constant on the card. A workspace that is kept
    is no module's.
    """
    trace = labelled.trace
    lives = _lives(trace)
    batches = micro_batches(trace)
    starts = [batch.start for batch in batches]
    again = _ends_of_recomputation(labelled, [born for born, _ in lives])
    found = []
    for block, (born, died) in enumerate(lives):
        origin, owner = labelled.origins[block], labelled.owners.get(block)
        if owner is not None:
            found.append(BlockUse(owner.category, owner.module, born, died))
            continue
        index = bisect_right(starts, born) - 1
        batch = batches[index] if index >= 0 and born < batches[index].end else None
        category: Category = "temporaries"
        module = origin.module
        if origin.role == "workspace":
            category = "workspace"
            module = module if died < len(trace.events) else 0
        elif batch is None:
            if index < 0 and died > trace.last_update:
                category = "parameters"
        elif origin.role == "summed" and died > batch.end:
            category = "gradients"
        elif died > (batch.backward if born < batch.backward else again[block]):
            category = "activations"
        found.append(BlockUse(category, module, born, died))
    return found


def micro_batches(trace: Trace) -> list[MicroBatch]:
    """The stretches of a trace in which a micro-batch is moved, goes forward and comes back, ascending."""
    ends = [*(index for index, _ in trace.phases[1:]), len(trace.events)]
    runs: list[list[tuple[int, int, int]]] = []
    last = None
    for (start, phase), end in zip(trace.phases, ends, strict=True):
        stage = _STAGES.get(phase)
        if stage is not None:
            if last is None or stage <= last:
                runs.append([])
            runs[-1].append((stage, start, end))
        last = stage
    return [
        MicroBatch(run[0][1], max((end for stage, _, end in run if stage < _BACKWARD), default=run[0][1]), run[-1][2])
        for run in runs
    ]


def _lives(trace: Trace) -> list[tuple[int, int]]:
    """By block, the indices of the events at which it comes and goes."""
    born, died = [0] * len(trace.sizes), [len(trace.events)] * len(trace.sizes)
    for index, event in enumerate(trace.events):
        if event >= 0:
            born[event] = index
        else:
            died[~event] = index
    return list(zip(born, died, strict=True))


def _ends_of_recomputation(labelled: LabelledTrace, born: Sequence[int]) -> list[int]:
    """By block that a forward within backward made, where the first one after it is made that is not of that forward.

    Of any other block it is a place that none outlives.
    """
    never = len(labelled.trace.events)
    ends, end = [never] * len(born), never
    for block in range(len(born) - 1, -1, -1):
        role = labelled.origins[block].role
        if role == "recomputed":
            ends[block] = end
        elif role not in _AGAIN:
            end = born[block]
    return ends


class MemoryBreakdown:
    """Adds up the blocks of a trace that are alive."""

    def __init__(self, labelled: LabelledTrace, sized: SizedTrace) -> None:
        self.labelled, self.sized = labelled, sized
        self.uses: Sequence[BlockUse] = classify_blocks(labelled)

    @cached_property
    def totals(self) -> Mapping[Category, Sequence[int]]:
        """By category, in order, the bytes that are held after each event; `unused` is no block's."""
        steps = {category: [0] * (len(self.labelled.trace.events) + 1) for category in CATEGORIES}
        del steps["unused"]
        for purpose, size in zip(self.uses, self.sized.sizes, strict=True):
            own = steps[purpose.category]
            own[purpose.born] += size
            own[purpose.died] -= size
        return {category: list(accumulate(step[:-1])) for category, step in steps.items()}

    @cached_property
    def held_bytes(self) -> Sequence[int]:
        """Return what is held after each event."""
        return [sum(held) for held in zip(*self.totals.values(), strict=True)]

    @cached_property
    def highest(self) -> Mapping[Phase, int]:
        """By phase, in order, the index of the event that asks for memory when most is held in it: the last such."""
        trace, held, sizes = self.labelled.trace, self.held_bytes, self.sized.sizes
        ends = [*(index for index, _ in trace.phases[1:]), len(trace.events)]
        found: dict[Phase, int] = {}
        for (start, phase), end in zip(trace.phases, ends, strict=True):
            for at in range(start, end):
                event = trace.events[at]
                asks = event >= 0 and (sizes[event] or not held[at])
                if asks and held[at] >= held[found.get(phase, at)]:
                    found[phase] = at
        return {phase: found[phase] for phase in get_args(Phase) if phase in found}

    @cached_property
    def peak_at(self) -> int:
        """The index of the event that asks for memory when most is held: the last such."""
        return max(self.highest.values(), key=lambda at: (self.held_bytes[at], at))

    def alive(self, event: int) -> list[tuple[int, Category]]:
        """The blocks that are there after an event, and what they are for."""
        return [
            (block, purpose.category) for block, purpose in enumerate(self.uses) if purpose.born <= event < purpose.died
        ]


_MOST = 10


def module_shares(
    breakdown: MemoryBreakdown, event: int, growth: tuple[SizedTrace, SizedTrace] | None = None
) -> list[ModuleShare]:
    """Return what each module holds after an event, in the model's order; like ones are one record.

    Averages are no module's: they count among what belongs to none, so that the shares add up to all that is held.
    """
    slopes = None if growth is None else _slopes(breakdown, growth)
    categories: dict[int, dict[Category, int]] = {}
    per_sample: dict[int, float] = {}
    for block, category in breakdown.alive(event):
        module = breakdown.uses[block].module
        held = categories.setdefault(module, {})
        held[category] = held.get(category, 0) + breakdown.sized.sizes[block]
        if slopes is not None:
            per_sample[module] = per_sample.get(module, 0.0) + slopes[block]
    return _joined(
        ModuleShare(
            name=breakdown.labelled.modules[module].path,
            kind=breakdown.labelled.modules[module].kind,
            count=1,
            bytes=sum(held.values()),
            categories={category: held[category] for category in CATEGORIES if held.get(category)},
            bytes_per_sample=None if slopes is None else round(per_sample[module]),
        )
        for module, held in sorted(categories.items())
        if any(held.values())
    )


def largest(shares: Iterable[ModuleShare], most: int = _MOST) -> tuple[ModuleShare, ...]:
    """The shares that hold most, the largest first."""
    return tuple(sorted(shares, key=lambda share: -share.bytes)[:most])


def _slopes(breakdown: MemoryBreakdown, growth: tuple[SizedTrace, SizedTrace]) -> Sequence[float] | None:
    """By block, the bytes that a sample more takes; None where the demands are not of the breakdown's events."""
    one, other = growth
    samples = other.trace.parts[0] - one.trace.parts[0]
    if samples == 0 or not all(sized.trace.events == breakdown.labelled.trace.events for sized in growth):
        return None
    return [(most - least) / samples for least, most in zip(one.sizes, other.sizes, strict=True)]


def _joined(shares: Iterable[ModuleShare]) -> list[ModuleShare]:
    """Shares that differ in nothing but numbers of their names, as one each, where the first of them is."""
    named: dict[str, ModuleShare] = {}
    alike: dict[tuple[object, ...], list[str]] = {}
    found = []
    for share in shares:
        if not share.name:
            found.append(share)
            continue
        named[share.name] = share
        key = mask_numbers(share.name), share.kind, tuple(share.categories.items()), share.bytes_per_sample
        alike.setdefault(key, []).append(share.name)
    return [*found, *(_times(named[names[0]], name, len(names)) for name, names in distinct_names(alike.values()))]


def _times(share: ModuleShare, name: str, count: int) -> ModuleShare:
    return replace(
        share,
        name=name,
        count=count,
        bytes=share.bytes * count,
        categories={category: held * count for category, held in share.categories.items()},
        bytes_per_sample=None if share.bytes_per_sample is None else share.bytes_per_sample * count,
    )


_APART: Final = ("_attention", "aten._softmax", "aten._safe_softmax")
"""What of an operator's name tells how attention is computed, whatever else the module makes."""


def holdings_at(breakdown: MemoryBreakdown, event: int) -> tuple[Holding, ...]:
    """Return what is held after an event, in the order of the model; what belongs to no module is first.

    Of operators that made as much of one holding it names the first. What tells how attention is computed is apart.
    """
    labelled, sizes = breakdown.labelled, breakdown.sized.sizes
    made: dict[tuple[int, int, str, str], Counter[str]] = {}
    for block, category in breakdown.alive(event):
        origin = labelled.origins[block]
        apart = origin.op if any(part in origin.op for part in _APART) else ""
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


def moments(breakdown: MemoryBreakdown) -> tuple[Moment, ...]:
    """When most is held in each phase of all that is traced, in the order of `Phase`; of equal moments the last."""
    found = []
    for phase, at in breakdown.highest.items():
        totals = {category: held[at] for category, held in breakdown.totals.items()}
        if any(totals.values()):
            found.append(
                Moment(
                    phase=phase,
                    held_bytes=breakdown.held_bytes[at],
                    categories={category: held for category, held in totals.items() if held},
                    holdings=holdings_at(breakdown, at),
                )
            )
    return tuple(found)


def explain_peak(
    breakdown: MemoryBreakdown,
    *,
    card: str,
    peak_bytes: int,
    context_bytes: int,
    growth: tuple[SizedTrace, SizedTrace] | None = None,
) -> Explanation:
    """Tell what is held at the moment when most is: all of an explanation but the changes."""
    at, trace = breakdown.peak_at, breakdown.labelled.trace
    categories: dict[Category, int] = {category: held[at] for category, held in breakdown.totals.items()}
    categories["unused"] = peak_bytes - sum(categories.values())
    origin = breakdown.labelled.origins[trace.events[at]]
    shares = module_shares(breakdown, at, growth)
    return Explanation(
        card=card,
        parts=trace.parts,
        peak_bytes=peak_bytes,
        categories=categories,
        context_bytes=context_bytes,
        phase=breakdown.sized.phase_at(at),
        op=origin.op,
        module=breakdown.labelled.modules[origin.module].path,
        modules=largest(shares),
    )
