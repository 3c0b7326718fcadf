"""The rows of a comparison are plans: for the right cards, ranks and savers, and equal to those of a plan alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from consoles import drawn
from factories import make_plan, message_at
from in_process_tracer import InProcessTracer
from planned import CARD, make_plan_setup, make_request, make_settings, plan_on, simulated_card
from small_blocks import blocks_source
from synthetic_traces import INSPECTION, SyntheticTracer

from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import CountCost, ListAlike, UseCard
from autoaccum.devices.simulated.trace_cache import TraceCache, run_on_cards
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.planning.comparison import ComparisonRequest, choose_world_sizes, find_rows, plan_front, plan_row
from autoaccum.planning.comparison_record import Comparison, ComparisonRow
from autoaccum.planning.plan_events import Event, SaversTried
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_trials import add_costs
from autoaccum.reporting.comparison_table import comparison_blocks, comparison_warnings
from autoaccum.simulation.cards import Card, find_card
from autoaccum.simulation.trace_records import Amount, UpdateCost
from autoaccum.units import GIB, MIB, MemorySize

SHARE = 8
NEEDED = {"a100": 1, "l4": 6, "t4": 9}
"""The least number of ranks that trains a made-up model, by card."""


def row_of(card: str, *, fits: bool = True, world_size: int = 1, **fields: Any) -> ComparisonRow:
    plan = make_plan(64, 16, world_size=world_size) if fits else None
    return ComparisonRow(card=card, world_size=world_size, plan=plan, limit_bytes=GIB, **fields)


def find(cards: Sequence[str], sizes: Sequence[int]) -> tuple[Comparison, list[tuple[str, int]]]:
    planned: list[tuple[str, int]] = []

    def plan(size: int, names: Sequence[str]) -> Iterator[ComparisonRow]:
        for card in names:
            yield row_of(card, fits=size >= NEEDED[card], world_size=size, message=f"{card} is full")

    return find_rows(plan, cards, sizes, lambda row: planned.append((row.card, row.world_size))), planned


def printed(table: Comparison) -> list[str]:
    return drawn(*comparison_blocks(table), width=200).splitlines()


def test_the_least_number_of_ranks_is_found_between_powers_of_two() -> None:
    table, planned = find(["l4"], choose_world_sizes(range(1, 33)))
    assert [size for _, size in planned] == [1, 2, 4, 8, 16, 32, 6, 5], "as they are found, each once"
    assert {row.world_size: row.fits for row in table.rows} == {n: n >= 6 for n in (1, 2, 4, 5, 6, 8, 16, 32)}
    assert table.least_world_sizes == {"l4": 6}
    lines = printed(table)
    assert lines[0].split() == ["ranks", "fits", "micro-batch", "iter_size", "needed", "peak", "headroom"]
    assert lines[4].split()[:4] == ["5", "no", "-", "-"]
    assert lines[-1] == "the smallest number of ranks that works is 6; on 5, l4 is full"
    partial = Comparison(table.rows, None)
    assert printed(partial) == lines[:-1], "no number of ranks is called the least"
    assert json.loads(partial.to_json())["least_world_sizes"] is None


def test_of_several_cards_each_is_planned_until_it_fits() -> None:
    table, planned = find(list(NEEDED), choose_world_sizes(range(1, 9)))
    assert table.least_world_sizes == {"a100": 1, "l4": 6}
    sizes = {card: [size for name, size in planned if name == card] for card in NEEDED}
    assert sizes == {"a100": [1], "l4": [1, 2, 4, 8, 6, 5], "t4": [1, 2, 4, 8]}
    lines = printed(table)
    assert [line.split()[:3] for line in lines[:4]] == [
        ["card", "ranks", "fits"],
        ["a100", "1", "yes"],
        ["l4", "6", "yes"],
        ["t4", ">", "8"],
    ]


def test_what_is_wrong_with_the_workload_ends_it() -> None:
    def plan(size: int, cards: Sequence[str]) -> Iterator[ComparisonRow]:
        raise WorkloadError("no model")

    with pytest.raises(WorkloadError, match="no model"):
        find_rows(plan, ["rtx3090"], [1, 2], lambda row: None)


def test_a_warning_says_which_rows_it_is_about() -> None:
    a, b = message_at("a"), message_at("b")
    rows = [row_of("t4", world_size=size, warnings=(a, b)[: 2 - size // 4]) for size in (1, 2, 4)]
    rows.append(row_of("t4", fits=False, world_size=8))
    assert comparison_warnings(rows) == [str(a), f"on 1 rank and 2 ranks: {b}"]
    several = [row_of(name, warnings=(b,)) for name in "abcdefg"]
    assert comparison_warnings([*several, row_of("h")]) == [f"on a, b, c, d and 3 others: {b}"]


def test_columns_that_do_not_apply_are_left_out_and_rows_sorted_by_what_is_better() -> None:
    rows = (
        row_of("none", fits=False),
        row_of("b", update_seconds=1.0, savers=("recompute=2",)),
        row_of("c", update_seconds=2.0),
        row_of("a"),
    )
    table = Comparison(rows, {})
    orders = {column: "".join(row.card[0] for row in table.sorted_by(column).rows) for column in ("card", "speed")}
    assert orders == {"card": "abcn", "speed": "bcan"}
    assert table.sorted_by(None) is table
    header, *lines = printed(table)
    assert header.split()[-2:] == ["speed", "savers"]
    assert [line.split()[:2] for line in lines[:2]] == [["none", "no"], ["b", "yes"]]
    assert "1.000" in lines[1]
    assert "0.500" in lines[2]
    assert lines[1].endswith("recompute=2")
    assert printed(Comparison((row_of("a"),), {}))[0].split() == [
        *("fits", "micro-batch", "iter_size", "needed", "peak", "headroom")
    ]


class Telling(SyntheticTracer):
    """Traces of a process that tells generations apart once it has counted; it may be handed on unless it `keeps`."""

    def __init__(self, card: Card, others: tuple[Card, ...], keeps: bool) -> None:
        super().__init__(inspection=INSPECTION)
        self.keeps = keeps
        self.use(card, others)

    def use(self, card: Card, others: tuple[Card, ...]) -> None:
        self.card, self.alike = card, others

    def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
        match request:
            case ListAlike():
                return tuple(card.name for card in self.alike)
            case UseCard(card=card, others=others):
                if not self.keeps:
                    self.use(card, others)
                return not self.keeps
            case CountCost():
                self.alike = tuple(card for card in self.alike if card.architecture == self.card.architecture)
                return UpdateCost(flops=Amount(sample=1e12), moved_bytes=Amount(), host_bytes=Amount())
        return super().call(request, limit_seconds)


@pytest.mark.parametrize("keeps", [False, True])
def test_cards_share_traces_until_these_tell_them_apart(keeps: bool) -> None:
    cards = [find_card(name) for name in ("t4", "rtx3090", "rtx2080-ti", "a10", "rtx4090")]
    tracers: list[Telling] = []
    fields: dict[str, Any] = {"torch_version": (2, 13), "memory": MemorySize(bytes=GIB)}
    fields["environment"] = {}

    def make_tracer(card: Card, others: tuple[Card, ...]) -> Any:
        tracers.append(Telling(card, others, keeps))
        return tracers[-1]

    def plan(card: Card, traces: TraceCache) -> ComparisonRow:
        setup = make_plan_setup(SimulatedDevice(card, traces, **fields))
        return plan_row(setup, make_request(64, gpu=card.name), card.name, estimates=True)

    rows = {card.name: row for card, row in run_on_cards(cards, plan, make_tracer, 64)}
    assert list(rows) == ["t4", "rtx2080-ti", "rtx3090", "a10", "rtx4090"], "by generation"
    assert [tracer.card.name for tracer in tracers] == (["t4", "rtx3090", "rtx4090"] if keeps else ["rtx4090"])
    traced = [parts for parts in tracers[0].traced if parts != (1, 1)]
    assert traced == [(2, 2), (5, 5), (5, 3)] * (1 if keeps else 3), "no card's own parts"
    assert all(tracer.closed == 1 for tracer in tracers)
    alone = plan_on(simulated_card(SyntheticTracer(), 64, GIB), 64, gpu="rtx3090")
    assert alone.iter_size > 2, "with parts of two sizes"
    shared = rows["rtx3090"].plan
    assert shared is not None
    for name in ("micro_batch", "iter_size", "peak_bytes", "min_budget_bytes", "limit_bytes"):
        assert getattr(shared, name) == getattr(alone, name), name
    rates = {name: row.samples_per_second or 0.0 for name, row in rows.items()}
    assert rates["t4"] < rates["rtx3090"] < rates["rtx4090"]


def device_with(path: str, memory_bytes: int, **options: Any) -> SimulatedDevice:
    return simulated_card(InProcessTracer(make_settings(path, SHARE, **options), CARD), SHARE, memory_bytes)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("workload") / "blocks.py"
    file.write_text(blocks_source(3, hidden=512, length=1024, width=128))
    return str(file)


def compare_savers(path: str, memory_bytes: int) -> tuple[list[ComparisonRow], list[Event]]:
    events: list[Event] = []
    with device_with(path, memory_bytes) as device:
        setup = make_plan_setup(device, "blocks.py")
        return plan_front(setup, make_request(SHARE, gpu="rtx3090"), "rtx3090", events.append), events


@pytest.mark.slow
def test_rows_of_savers_are_what_a_plan_with_them_finds(path: str) -> None:
    rows, events = compare_savers(path, 126 * MIB)
    assert rows[0].savers == ()
    sizes = [row.plan.micro_batch for row in rows if row.plan]
    assert sizes == sorted(set(sizes)), "no set beats another"
    assert 1 < len(rows) == len(sizes)
    rates = [row.samples_per_second or 0.0 for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert any(isinstance(event, SaversTried) for event in events)
    last = rows[-1].plan
    assert last is not None
    alone = plan_on(device_with(path, 126 * MIB, savers=rows[-1].savers), SHARE, gpu="rtx3090")
    assert (last.micro_batches, last.peak_bytes) == (alone.micro_batches, alone.peak_bytes)
    assert last.spec.savers == alone.spec.savers == rows[-1].savers
    assert Plan.from_json(json.dumps(json.loads(Comparison(tuple(rows), {}).to_json())["rows"][-1]["plan"])) == last


@pytest.mark.slow
def test_costs_of_savers_that_do_not_meet_add_up(path: str) -> None:
    device = device_with(path, 126 * MIB)

    def count(*words: str) -> UpdateCost:
        device.use_savers(words)
        return device.count_cost()

    with device:
        device.inspect()
        for one, other in (
            (("recompute=2", "offload-activations"), ("offload-gradients",)),
            (("recompute=3",), ("offload-gradients", "offload-optimizer")),
        ):
            assert add_costs(count(*one), count(*other), count()) == count(*one, *other)


@pytest.mark.slow
def test_what_does_not_fit_with_any_savers_is_one_row(path: str) -> None:
    (row,), _ = compare_savers(path, 8 * MIB)
    assert (row.savers, row.fits, row.message is None) == ((), False, False)


def test_the_cost_of_a_million_samples() -> None:
    plan = make_plan(200, 100)
    row = ComparisonRow(card="t4", world_size=2, plan=plan, limit_bytes=1, update_seconds=2.0, price_per_hour=0.36)
    assert row.cost_per_million == pytest.approx(0.36 * 2 * 1e6 / 100 / 3600)
    assert dataclasses.replace(row, price_per_hour=None).cost_per_million is None


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("card,price\nt4,1\n", "has no prices"),
        ("name,per_hour\nt4,-1\n", "per_hour is -1"),
        ("name,per_hour\nt4\n", "has no prices"),
        ("name,per_hour\nabacus,1\n", "abacus"),
        ("name,per_hour\nl4,1\n", "no price is of t4,h100"),
        (None, "No such file"),
    ],
)
def test_prices_that_cannot_be_used(text: str | None, seen: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "prices.csv").write_text(text)
    with pytest.raises(UsageError, match=seen):
        ComparisonRequest(target_batch=8, gpu="t4,h100", prices=tmp_path / "prices.csv")


def test_cost_needs_prices() -> None:
    with pytest.raises(UsageError, match="cost needs the prices of cards: give them: --prices FILE"):
        ComparisonRequest(target_batch=8, gpu="t4,h100", sort="cost")
