"""What several cards and numbers of ranks would train."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from asking import make_request
from synthetic_traces import INSPECTION, SyntheticTracer, make_trace

from autoaccum.accumulation.schedule import even_parts
from autoaccum.devices.base import Device
from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.card_fleet import CardFleet
from autoaccum.devices.simulated.cards import Card, find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import CountCost, ListAlike, TraceParts, UseCard
from autoaccum.devices.update_cost import Amount, UpdateCost
from autoaccum.errors import WorkloadError
from autoaccum.planning.plan_comparison import (
    PlanRow,
    choose_world_sizes,
    compare_plans,
    find_least,
    plan_each,
    plan_row,
)
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.reporting.console import make_console
from autoaccum.reporting.plan_table import (
    plan_table_json,
    print_cards_table,
    print_ranks_table,
    sort_rows,
    table_warnings,
)
from autoaccum.units import GIB, MIB, MemorySize


class SharedWeights(SyntheticTracer):
    """Traces of one of `ranks`, whose layers are divided evenly."""

    def __init__(self, layer_bytes: int, ranks: int) -> None:
        super().__init__(inspection=INSPECTION)
        self._layer_bytes = even_parts(layer_bytes, ranks)[0]

    def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
        if isinstance(request, TraceParts):
            return make_trace(request.parts, self._activations, layer_bytes=self._layer_bytes)
        return super().call(request, limit_seconds)


class Planner:
    """Plans for a model of 16 x `layer_bytes` on ranks of 2 GiB."""

    def __init__(self, layer_bytes: int) -> None:
        self._layer_bytes = layer_bytes
        self.planned: list[int] = []

    def __call__(self, size: int, cards: Sequence[str]) -> Iterator[PlanRow]:
        self.planned.append(size)
        (card,) = cards
        request, memory = make_request(64, world_size=size, gpu=card), MemorySize(bytes=2 * GIB)
        tracer = SharedWeights(self._layer_bytes, size)
        with SimulatedDevice(
            find_card(card), lambda: tracer, share=request.share, torch_version=(2, 13), memory=memory, environment={}
        ) as device:
            yield plan_row(PlanSetup(device, "model.py", isolated=False), request, card, estimates=False)()


def test_the_least_number_of_ranks_is_found_between_powers_of_two() -> None:
    planner, told = Planner(layer_bytes=1200 * MIB), list[PlanRow]()
    rows = compare_plans(planner, ["rtx3090"], choose_world_sizes(range(1, 33)), told.append)
    assert [row.world_size for row in told] == planner.planned, "as they are found"
    fitting = {row.world_size: row.fits for row in rows}
    least = find_least(rows)["rtx3090"]
    assert least == 10
    assert fitting == {size: size >= least for size in (1, 2, 4, 8, 9, 10, 12, 16, 32)}
    assert [row.world_size for row in rows] == sorted(fitting)
    assert sorted(planner.planned) == sorted(fitting), "each once"
    first, last = rows[0], rows[-1]
    assert first.peak_bytes is not None
    assert first.peak_bytes > 16 * 1200 * MIB
    assert first.message is not None
    assert (first.micro_batch, first.iter_size, last.micro_batch, last.iter_size) == (None, None, 2, 1)
    assert last.peak_bytes is not None
    assert last.limit_bytes == 2 * GIB > last.peak_bytes


@pytest.mark.parametrize(("layer_bytes", "least"), [(25 * MIB, 2), (2**50, None)])
def test_all_or_none_may_fit(layer_bytes: int, least: int | None) -> None:
    planner = Planner(layer_bytes)
    rows = compare_plans(planner, ["rtx3090"], [2, 5])
    assert (find_least(rows).get("rtx3090"), planner.planned) == (least, [2, 5])
    print_ranks_table(make_console(file=(file := io.StringIO()), width=200), rows)
    assert file.getvalue().endswith("the model is 2; fewer were not tried\n") == (least == 2)


def test_what_is_wrong_with_the_workload_ends_it() -> None:
    def plan(size: int, cards: Sequence[str]) -> Iterator[PlanRow]:
        raise WorkloadError("no model")

    with pytest.raises(WorkloadError, match="no model"):
        compare_plans(plan, ["rtx3090"], [1, 2])


def test_the_table_and_the_records() -> None:
    rows = compare_plans(Planner(layer_bytes=1200 * MIB), ["rtx3090"], [8, 16])
    file = io.StringIO()
    print_ranks_table(make_console(file=file, width=200), rows)
    lines = file.getvalue().splitlines()
    assert lines[0].split() == ["ranks", "fits", "micro-batch", "iter_size", "needed", "peak", "reduce"]
    assert lines[1].split()[:4] == ["8", "no", "-", "-"]
    assert lines[-2].split()[:4] == ["16", "yes", "4", "1"]
    assert lines[-1].startswith("the least number of ranks that trains the model is 10; on 9, micro-batch 1 does not")
    record = json.loads(plan_table_json(rows))
    assert record["least_world_sizes"] == {"rtx3090": 10}
    assert [row["world_size"] for row in record["plans"]] == [8, 9, 10, 12, 16]
    assert record["plans"][0]["message"].startswith("micro-batch 1 does not fit: it would take")
    print_ranks_table(make_console(file=(partial := io.StringIO()), width=200), rows, is_whole=False)
    assert partial.getvalue().splitlines() == lines[:-1], "no number of ranks is called the least"
    assert "least_world_sizes" not in json.loads(plan_table_json(rows, is_whole=False))


def test_a_warning_says_which_rows_it_is_about() -> None:
    about = {1: None, 2: ("of all", "close"), 4: ("of all", "close"), 8: ("of all",)}
    rows = [
        PlanRow(card="t4", world_size=size, fits=bool(texts), warnings=texts or ()) for size, texts in about.items()
    ]
    assert table_warnings(rows) == ["of all", "on 2 and 4 ranks close"]


def test_of_several_cards_each_is_planned_until_it_fits() -> None:
    needed = {"a100": 1, "l4": 6, "t4": 9}
    planned: list[tuple[str, int]] = []

    def plan(size: int, cards: Sequence[str]) -> Iterator[PlanRow]:
        for card in cards:
            planned.append((card, size))
            savers = ("recompute=2",) if card == "l4" else ()
            yield PlanRow(card=card, world_size=size, fits=size >= needed[card], savers=savers)

    rows = compare_plans(plan, list(needed), choose_world_sizes(range(1, 9)))
    assert find_least(rows) == {"a100": 1, "l4": 6}
    sizes = {card: [size for name, size in planned if name == card] for card in needed}
    assert sizes == {"a100": [1], "l4": [1, 2, 4, 8, 6, 5], "t4": [1, 2, 4, 8]}
    file = io.StringIO()
    print_cards_table(make_console(file=file, width=60), rows, names_ranks=True)
    assert [line.split()[:3] for line in file.getvalue().splitlines()[:4]] == [
        ["card", "ranks", "fits"],
        ["a100", "1", "yes"],
        ["l4", "6", "yes"],
        ["t4", ">", "8"],
    ]
    assert [line.split()[-1] for line in file.getvalue().splitlines()[:3]] == ["savers", "savers", "recompute=2"]


def test_rows_are_sorted_by_what_is_better() -> None:
    fields: list[dict[str, Any]] = [
        {"card": "b", "micro_batch": 4, "samples_per_second": 9.0, "cost_per_million": 3.0, "least_bytes": 5},
        {"card": "c", "micro_batch": 8, "samples_per_second": 7.0, "cost_per_million": None, "least_bytes": 7},
        {"card": "a", "micro_batch": 2, "samples_per_second": 8.0, "cost_per_million": 1.0, "least_bytes": 6},
    ]
    rows = [PlanRow(card="none", fits=False), *(PlanRow(fits=True, **row) for row in fields)]
    orders = {column: "".join(row.card[0] for row in sort_rows(rows, column)) for column in ("card", "speed", "cost")}
    assert orders == {"card": "abcn", "speed": "bacn", "cost": "abcn"}
    assert [row.card for row in sort_rows(rows, "micro-batch")] == ["c", "b", "a", "none"]
    assert sort_rows(rows, None) == rows


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
    made: list[Telling] = []
    fields: dict[str, Any] = {"share": 64, "torch_version": (2, 13), "memory": MemorySize(bytes=GIB)}
    fields["environment"] = {}

    def make_tracer(card: Card, others: tuple[Card, ...]) -> Telling:
        made.append(Telling(card, others, keeps))
        return made[-1]

    def plan(card: Card, device: Device) -> Callable[[], PlanRow]:
        request = make_request(64, gpu=card.name)
        return plan_row(PlanSetup(device, "model.py", isolated=False), request, card.name, price=2.0)

    fleet = CardFleet(
        make_tracer, lambda card, traces, replays: SimulatedDevice(card, traces, replays=replays, **fields), 64
    )
    rows = list(plan_each(fleet, cards, plan))
    fleet.close()
    assert [row.card for row in rows] == ["t4", "rtx2080-ti", "rtx3090", "a10", "rtx4090"], "by generation"
    assert [tracer.card.name for tracer in made] == (["t4", "rtx3090", "rtx4090"] if keeps else ["rtx4090"])
    traced = [parts for parts in made[0].traced if parts != (1, 1)]
    assert traced == [(2, 2), (5, 5), (5, 3)] * (1 if keeps else 3), "no card's own parts"
    assert all(tracer.closed == 1 for tracer in made)
    with SimulatedDevice(cards[1], lambda: SyntheticTracer(inspection=INSPECTION), **fields) as device:
        alone = plan_on_device(PlanSetup(device, "model.py", isolated=False), make_request(64, gpu="rtx3090"))
    assert alone.iter_size > 2, "with parts of two sizes"
    shared = next(row for row in rows if row.card == "rtx3090")
    for name in ("micro_batch", "iter_size", "peak_bytes", "least_bytes", "limit_bytes"):
        assert getattr(shared, name) == getattr(alone, name), name
    rates = {row.card: row.samples_per_second or 0.0 for row in rows}
    assert rates["t4"] < rates["rtx3090"] < rates["rtx4090"]
    assert shared.cost_per_million == pytest.approx(2.0 * 1e6 / 3600 / rates["rtx3090"])
