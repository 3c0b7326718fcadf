"""Explanations of the peak of a trace: uses of blocks, categories, modules, holdings, and the curve of peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from example_counts import count_examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_up_card import held_bytes, most_held
from synthetic_traces import make_trace

from autoaccum.devices.simulated.breakdown import MemoryBreakdown, classify_blocks, module_shares
from autoaccum.devices.simulated.explainer import curve_points, make_timeline
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import (
    CATEGORIES,
    NO_MODULE,
    LabelledTrace,
    ModuleName,
    Origin,
    Owner,
    Phase,
    Role,
    Trace,
)
from autoaccum.units import GIB, MIB

Phases = list[tuple[int, Phase]]
REPLAYER = Replayer(find_card("rtx3090"), AllocatorSettings(), (2, 13))


def break_down(labelled: LabelledTrace) -> MemoryBreakdown:
    return MemoryBreakdown(labelled, REPLAYER)


def labelled(
    events: list[int],
    phases: Phases,
    roles: dict[int, Role] | None = None,
    owners: dict[int, Owner] | None = None,
    last_update: int = 0,
) -> LabelledTrace:
    """A trace whose blocks take 1, 2, 4 and so on bytes."""
    blocks = sum(event >= 0 for event in events)
    trace = Trace(
        parts=(2, 2),
        events=tuple(events),
        sizes=tuple(1 << block for block in range(blocks)),
        phases=tuple(phases),
        last_update=last_update,
    )
    origins = tuple(Origin("aten.add", 1, (roles or {}).get(block, "plain")) for block in range(blocks))
    return LabelledTrace(
        trace=trace, modules=(NO_MODULE, ModuleName("layer", "Linear")), origins=origins, owners=owners or {}
    )


def categories(found: LabelledTrace) -> list[str]:
    return [use.category for use in classify_blocks(found)]


def test_a_block_that_outlives_its_forward_is_an_activation() -> None:
    # Blocks 0 and 1 go within forward and when backward has begun, 2 is of backward.
    found = labelled([0, 1, ~0, 2, ~1, ~2], [(0, "forward"), (3, "backward")])
    assert categories(found) == ["temporaries", "activations", "temporaries"]


def test_a_forward_within_backward_has_activations_of_its_own() -> None:
    roles: dict[int, Role] = {2: "recomputed", 3: "workspace", 4: "recomputed", 6: "recomputed"}
    events = [0, 1, 2, 3, ~3, 4, ~2, 5, ~4, 6, 7, ~6]
    found = labelled(events, [(0, "forward"), (1, "backward")], roles)
    inner = ["temporaries", "workspace", "activations", "temporaries", "activations", "temporaries"]
    assert categories(found)[2:] == inner


def test_accumulated_gradients_outlive_their_micro_batch() -> None:
    roles: dict[int, Role] = {1: "summed", 2: "summed"}
    found = labelled([0, 1, 2, ~1, 3, ~2], [(0, "forward"), (1, "backward"), (4, "update")], roles)
    assert categories(found)[1:3] == ["temporaries", "gradients"]


def test_a_block_belongs_to_its_owner() -> None:
    owners = {0: Owner("optimizer_state", 1), 1: Owner("gradients", 0)}
    found = labelled([0, 1], [(0, "forward"), (1, "backward")], owners=owners)
    assert [use[:2] for use in classify_blocks(found)] == [("optimizer_state", 1), ("gradients", 0)]


@st.composite
def labelled_traces(draw: st.DrawFn) -> LabelledTrace:
    events: list[int] = []
    alive: list[int] = []
    count = 0
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.booleans()) and alive:
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            events.append(count)
            alive.append(count)
            count += 1
    starts = sorted({0, *draw(st.sets(st.integers(0, len(events) - 1), max_size=8))})
    names: st.SearchStrategy[Any] = st.sampled_from(
        ["model", "batch", "forward", "backward", "clip", "update", "evaluation"]
    )
    trace = Trace(
        parts=(2, 2),
        events=tuple(events),
        sizes=tuple(draw(st.lists(st.integers(0, 1 << 22), min_size=count, max_size=count))),
        phases=tuple((start, draw(names)) for start in starts),
        last_update=draw(st.integers(0, len(events) - 1)),
    )
    roles: st.SearchStrategy[Any] = st.sampled_from(["plain", "recomputed", "summed", "workspace"])
    origins = tuple(Origin(draw(st.sampled_from("ab")), draw(st.integers(0, 4)), draw(roles)) for _ in range(count))
    kinds: Any = st.sampled_from(CATEGORIES[:-1])
    owners = draw(st.dictionaries(st.integers(0, max(count - 1, 0)), st.builds(Owner, kinds, st.integers(0, 4))))
    modules = (NO_MODULE, *(ModuleName(f"layers.{layer}", "Linear") for layer in range(4)))
    return LabelledTrace(trace=trace, modules=modules, origins=origins, owners=owners)


@settings(max_examples=count_examples(200))
@given(labelled_traces(), st.integers(1, 50))
def test_categories_and_modules_add_up_at_every_event(found: LabelledTrace, points: int) -> None:
    held = held_bytes(found.trace.events, found.trace.sizes)
    breakdown = break_down(found)
    assert list(breakdown.held_bytes) == held
    assert all(min(total) >= 0 for total in breakdown.totals.values())
    assert held[breakdown.peak_at] == max(held)
    for event in (breakdown.peak_at, len(held) - 1):
        holdings = breakdown.holdings(event)
        for category, total in breakdown.totals.items():
            assert sum(holding.bytes for holding in holdings if holding.category == category) == total[event]
        assert sum(share.bytes for share in module_shares(holdings)) == held[event]
    timeline = make_timeline(breakdown, points)
    drawn = [sum(column) for column in zip(*timeline.categories.values(), strict=True)]
    assert len(drawn) == len(timeline.reserved_bytes) <= points
    assert drawn[timeline.peak_at] == max(drawn)
    assert max(held) * 0.999 <= max(drawn) <= max(held)
    indices = [index for index, _ in timeline.phases]
    assert indices == sorted(set(indices))
    assert all(index < len(drawn) for index in indices)


def breakdown_of_blocks(
    sizes: Sequence[int], events: Sequence[int] | None = None, modules: Sequence[ModuleName] = ()
) -> MemoryBreakdown:
    """Break down blocks of these sizes: with `modules`, one is a parameter of each; without, they have no module."""
    blocks = range(len(sizes))
    trace = Trace(
        parts=(1,),
        events=tuple(blocks if events is None else events),
        sizes=tuple(sizes),
        phases=((0, "forward"),),
        last_update=0,
    )
    origins = tuple(Origin(op=f"aten.op{block}", module=0) for block in blocks)
    owners = {block: Owner("parameters", block + 1) for block in blocks} if modules else {}
    return break_down(LabelledTrace(trace=trace, modules=(NO_MODULE, *modules), origins=origins, owners=owners))


def test_the_peak_is_at_a_request_for_memory() -> None:
    """A block of no bytes that is freed right after leaves as much held, and requests nothing."""
    breakdown = breakdown_of_blocks((MIB, MIB, 0), (0, 1, 2, ~2, ~1, ~0))
    assert breakdown.peak_at == 1
    assert breakdown.explain_peak(card="any", context_bytes=0).op == "aten.op1"


HOLDS = st.dictionaries(
    st.builds("layer{}.{}.conv{}".format, st.integers(1, 4), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.sampled_from(["Conv2d", "Linear"]), st.integers(1, 3)),
    min_size=1,
)


@given(HOLDS)
@example({f"h.{layer}.attn": ("Attention", 8) for layer in range(12)})
def test_equal_modules_share_a_name_and_nothing_is_lost(holds: dict[str, tuple[str, int]]) -> None:
    sizes, modules = [size for _, size in holds.values()], [ModuleName(name, kind) for name, (kind, _) in holds.items()]
    shares = module_shares(breakdown_of_blocks(sizes, modules=modules).holdings(len(holds) - 1))
    assert len({share.name for share in shares}) == len(shares)
    assert sum(share.count for share in shares) == len(holds)
    assert sum(share.bytes for share in shares) == sum(sizes)
    if "h.0.attn" in holds:
        assert [(share.name, share.count, share.bytes) for share in shares] == [("h.{0..11}.attn", 12, 96)]


def curve_peak(size: int) -> int:
    trace = make_trace((size, size), lambda samples: 3 * MIB + samples * 6 * MIB)
    return REPLAYER.peak_bytes(trace)


def test_the_curve_goes_on_to_where_it_crosses_the_budget() -> None:
    points = curve_points(curve_peak, size=20, most=256, limit_bytes=2 * GIB)
    assert points[0].size == 2
    assert 20 in [point.size for point in points]
    assert all(point.size < later.size for point, later in pairwise(points))
    assert all(point.peak_bytes == curve_peak(point.size) for point in points)
    assert points[-2].peak_bytes < 1.2 * 2 * GIB
    assert 2 * GIB < points[-1].peak_bytes < 1.3 * 2 * GIB


TRANSFORMER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(2))
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers: x = self.run(layer, x)
        return self.head(x)
    def run(self, layer, x):
        return layer(x)
model = Net
def batch(n): return torch.randint(0, 500, (n, 32))
def loss(model, tokens): return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
del globals()["criterion"]
"""
AGAIN = "Net.run = lambda net, layer, x: checkpoint(layer, x, use_reentrant={})\n"
HALF = "whole = Net\ndef model(): return whole().to(torch.bfloat16)\n"
WORKLOADS: Mapping[str, tuple[str, str | None]] = {
    "transformer-bf16": (TRANSFORMER, "bf16"),
    "transformer-half": (TRANSFORMER + HALF, None),
    "transformer-checkpointed": (TRANSFORMER + AGAIN.format(False), "bf16"),
    "transformer-kept": (TRANSFORMER + "ema = hold_outputs = True\nevaluation_batch = 4\n", None),
}


@pytest.mark.parametrize("name", ["transformer-bf16", "transformer-checkpointed", "transformer-kept"])
def test_categories_and_modules_add_up_to_the_peak(explained: Callable[..., Any], name: str) -> None:
    lines, precision = WORKLOADS[name]
    found = explained(lines, precision, size=8)
    explanation, breakdown = found.explanation, found.breakdown
    assert tuple(explanation.categories) == CATEGORIES
    assert all(held >= 0 for held in explanation.categories.values())
    assert sum(explanation.categories.values()) == explanation.peak_bytes == breakdown.peak_bytes
    holdings = breakdown.holdings(breakdown.peak_at)
    held = sum(holding.bytes for holding in holdings)
    assert held == explanation.peak_bytes - explanation.categories["unused"]
    assert held == most_held(found.labelled.trace.events, breakdown.sized.sizes)
    shares = module_shares(holdings)
    for category in CATEGORIES[:-1]:
        assert sum(share.categories.get(category, 0) for share in shares) == explanation.categories[category]
    assert explanation.modules == tuple(sorted(shares, key=lambda share: -share.bytes)[:10])
    keys = [(holding.module, holding.kind, holding.category, holding.dtype, holding.op) for holding in holdings]
    assert len(set(keys)) == len(keys)
    order = [found.labelled.modules.index(ModuleName(holding.module, holding.kind)) for holding in holdings]
    assert order == sorted(order)


@pytest.mark.parametrize("parts", [[8], [8, 3]], ids=str)
def test_any_schedule_can_be_explained(explained: Callable[..., Any], parts: list[int]) -> None:
    found = explained(*WORKLOADS["transformer-half"], parts=parts)
    assert sum(found.explanation.categories.values()) == found.explanation.peak_bytes
    # Sums in float32 are for more than one micro-batch; otherwise a gradient is as its parameter is.
    held = found.before("clip")
    assert held["gradients"] == held["parameters"] * (1 if len(parts) == 1 else 2)
    assert found.before("backward")["outputs"] == 0
