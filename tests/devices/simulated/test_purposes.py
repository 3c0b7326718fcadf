"""What blocks of small traces are for, written by hand; and that nothing is lost, whatever the labels."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES
from autoaccum.devices.simulated.breakdown import Ledger, MicroBatch, micro_batches, module_shares, purposes
from autoaccum.devices.simulated.explaining import draw_timeline
from autoaccum.devices.simulated.replays import Demand
from autoaccum.devices.simulated.trace import NO_MODULE, Claim, LabelledTrace, ModuleName, Origin, Role, Trace

Phases = list[tuple[int, Phase]]


def labelled(
    events: list[int],
    phases: Phases,
    roles: dict[int, Role] | None = None,
    claims: dict[int, Claim] | None = None,
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
        trace=trace, modules=(NO_MODULE, ModuleName("layer", "Linear")), origins=origins, claims=claims or {}
    )


def ledger_of(found: LabelledTrace) -> Ledger:
    sizes = tuple(size for size in found.trace.sizes if isinstance(size, int))
    return Ledger(found, Demand(found.trace, sizes, 0, ()))


def categories(found: LabelledTrace) -> list[str]:
    return [purpose.category for purpose in purposes(found)]


def test_what_outlives_its_forward_is_an_activation() -> None:
    # Blocks 0 and 1 go within forward and when backward has begun, 2 is of backward.
    found = labelled([0, 1, ~0, 2, ~1, ~2], [(0, "forward"), (3, "backward")])
    assert categories(found) == ["temporaries", "activations", "temporaries"]


def test_inputs_are_of_the_forward_that_follows() -> None:
    assert categories(labelled([0, 1, 2, ~0], [(0, "batch"), (1, "forward"), (2, "backward")]))[0] == "activations"


def test_what_is_left_of_a_micro_batch_stays_an_activation() -> None:
    found = labelled([0, 1, 2, 3, ~0, ~2], [(0, "forward"), (1, "backward"), (2, "batch"), (3, "backward")])
    ledger = ledger_of(found)
    assert categories(found) == ["activations", "temporaries", "activations", "temporaries"]
    assert list(ledger.totals["activations"]) == [1, 1, 5, 5, 4, 0]
    assert (0, "activations") in ledger.alive(2)


def test_outputs_that_are_claimed_are_outputs_from_the_start() -> None:
    found = labelled([0, 1, 2, ~0], [(0, "forward"), (1, "backward")], claims={0: Claim("outputs", 1)})
    assert list(ledger_of(found).totals["outputs"]) == [1, 1, 1, 0]


def test_a_forward_within_backward_has_activations_of_its_own() -> None:
    roles: dict[int, Role] = {2: "recomputed", 3: "workspace", 4: "recomputed", 6: "recomputed"}
    events = [0, 1, 2, 3, ~3, 4, ~2, 5, ~4, 6, 7, ~6]
    found = labelled(events, [(0, "forward"), (1, "backward")], roles)
    assert categories(found)[2:] == [
        "temporaries",
        "workspace",
        "activations",
        "temporaries",
        "activations",
        "temporaries",
    ]


def test_sums_of_gradients_outlive_their_micro_batch() -> None:
    roles: dict[int, Role] = {1: "summed", 2: "summed"}
    found = labelled([0, 1, 2, ~1, 3, ~2], [(0, "forward"), (1, "backward"), (4, "update")], roles)
    assert categories(found)[1:3] == ["temporaries", "gradients"]


def test_a_constant_that_was_there_before_counts_as_parameters() -> None:
    found = labelled([0, 1, ~1, 2, 3], [(0, "model"), (3, "forward"), (4, "backward")], last_update=3)
    assert categories(found)[:2] == ["parameters", "temporaries"]


def test_who_claims_a_block_has_it() -> None:
    claims = {0: Claim("optimizer_state", 1), 1: Claim("gradients", 0)}
    found = labelled([0, 1], [(0, "forward"), (1, "backward")], claims=claims)
    assert [(purpose.category, purpose.module) for purpose in purposes(found)] == [
        ("optimizer_state", 1),
        ("gradients", 0),
    ]


def test_a_workspace_that_is_kept_is_no_module_s() -> None:
    found = labelled([0, 1, ~1], [(0, "forward")], {0: "workspace", 1: "workspace"})
    assert [(purpose.category, purpose.module) for purpose in purposes(found)] == [("workspace", 0), ("workspace", 1)]


def test_micro_batches_are_told_by_their_phases() -> None:
    phases: Phases = [
        (0, "model"), (1, "batch"), (2, "forward"), (3, "backward"), (4, "batch"), (5, "forward"), (6, "backward"),
        (7, "clip"), (8, "update"), (9, "evaluation"), (10, "forward"), (11, "backward"),
    ]  # fmt: skip
    assert micro_batches(labelled(list(range(12)), phases).trace) == [
        MicroBatch(1, 3, 4),
        MicroBatch(4, 6, 7),
        MicroBatch(10, 11, 12),
    ]
    # One that needs no gradient has no backward.
    assert micro_batches(labelled([0, 1, 2], [(0, "forward"), (1, "batch"), (2, "forward")]).trace) == [
        MicroBatch(0, 1, 1),
        MicroBatch(1, 3, 3),
    ]


def test_the_peak_is_that_of_the_last_update_unless_more_was_held_before() -> None:
    phases: Phases = [(0, "forward")]
    assert ledger_of(labelled([0, 1, ~0, ~1, 2, ~2, 3], phases, last_update=4)).peak_at == 6
    assert ledger_of(labelled([0, 1, 2, ~2, ~1, ~0], phases, last_update=5)).peak_at == 2


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [((10_000, 10, 10_000), 2), ((10_000, 11, 10_000), 6), ((0, 10_001, 10_000), 6)],
    ids=["as high", "lower", "of something else"],
)
def test_a_last_update_that_is_like_the_peak_is_shown_alone(sizes: tuple[int, ...], shown: int) -> None:
    claims = {block: Claim("outputs" if block == 1 else "averages", 0) for block in range(3)}
    found = labelled([0, 1, ~0, ~1, 2, ~2], [(0, "forward")], claims=claims, last_update=4)
    ledger = ledger_of(replace(found, trace=replace(found.trace, sizes=sizes)))
    timeline = draw_timeline(ledger, list(range(6)))
    assert ledger.peak_at == 1
    assert len(timeline.reserved_bytes) == shown
    assert timeline.peak_at == (0 if shown == 2 else 1)


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
    claims = draw(st.dictionaries(st.integers(0, max(count - 1, 0)), st.builds(Claim, kinds, st.integers(0, 4))))
    modules = (NO_MODULE, *(ModuleName(f"layers.{layer}", "Linear") for layer in range(4)))
    return LabelledTrace(trace=trace, modules=modules, origins=origins, claims=claims)


@settings(max_examples=200)
@given(labelled_traces(), st.integers(1, 50))
def test_nothing_is_lost_or_told_twice(found: LabelledTrace, points: int) -> None:
    sizes = [size for size in found.trace.sizes if isinstance(size, int)]
    held = list(accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in found.trace.events))
    ledger = ledger_of(found)
    assert list(ledger.held_bytes) == held
    assert all(min(total) >= 0 for total in ledger.totals.values())
    assert held[ledger.peak_at] == max(held)
    for event in (ledger.peak_at, len(held) - 1):
        of_blocks = dict.fromkeys(CATEGORIES[:-1], 0)
        for block, category in ledger.alive(event):
            of_blocks[category] += sizes[block]
        assert of_blocks == {category: total[event] for category, total in ledger.totals.items()}
        assert sum(share.bytes for share in module_shares(ledger, event)) == held[event]
    timeline = draw_timeline(ledger, list(range(len(held))), points)
    drawn = [sum(column) for column in zip(*timeline.categories.values(), strict=True)]
    assert len(drawn) == len(timeline.reserved_bytes) <= points
    assert drawn[timeline.peak_at] == max(drawn)
    assert max(held) * 0.999 <= max(drawn) <= max(held)
    indices = [index for index, _ in timeline.phases]
    assert indices == sorted(set(indices))
    assert all(index < len(drawn) for index in indices)


@given(labelled_traces())
def test_a_record_tells_all(found: LabelledTrace) -> None:
    assert LabelledTrace.from_record(json.loads(json.dumps(found.to_record()))) == found
