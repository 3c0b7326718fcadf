"""What several numbers of ranks would train."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from asking import make_request
from synthetic_traces import INSPECTION, SyntheticTracer, make_trace

from autoaccum.accumulation.schedule import even_parts
from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.trial_record import PartsRequest
from autoaccum.errors import WorkloadError
from autoaccum.planning.plan_events import Listener
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.world_sizes import WorldSize, choose_world_sizes, compare_world_sizes, find_least
from autoaccum.reporting.console import make_console
from autoaccum.reporting.world_sizes_report import print_world_sizes, world_sizes_json, world_sizes_warnings
from autoaccum.units import GIB, MIB, MemorySize


class SharedWeights(SyntheticTracer):
    """Traces of one of `ranks`, whose layers are divided evenly."""

    def __init__(self, layer_bytes: int, ranks: int) -> None:
        super().__init__(inspection=INSPECTION)
        self._layer_bytes = even_parts(layer_bytes, ranks)[0]

    def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
        if isinstance(request, PartsRequest):
            return make_trace(request.parts, self._activations, layer_bytes=self._layer_bytes)
        return super().call(request, limit_seconds)


class Planner:
    """Plans for a model of 16 x `layer_bytes` on ranks of 2 GiB."""

    def __init__(self, layer_bytes: int) -> None:
        self._layer_bytes = layer_bytes
        self.planned: list[int] = []

    def __call__(self, size: int, listen: Listener) -> Plan:
        self.planned.append(size)
        request, memory = make_request(64, world_size=size, gpu="rtx3090"), MemorySize(bytes=2 * GIB)
        tracer = SharedWeights(self._layer_bytes, size)
        with SimulatedDevice(
            find_card("rtx3090"),
            lambda: tracer,
            share=request.share,
            torch_version=(2, 13),
            memory=memory,
            environment={},
        ) as device:
            return plan_on_device(PlanSetup(device, "model.py", isolated=False), request, on_event=listen)


def test_the_least_number_of_ranks_is_found_between_powers_of_two() -> None:
    planner, told = Planner(layer_bytes=1200 * MIB), list[WorldSize]()
    rows = compare_world_sizes(planner, choose_world_sizes(range(1, 33)), told.append)
    assert [row.world_size for row in told] == planner.planned, "as they are found"
    fitting = {row.world_size: row.fits for row in rows}
    least = find_least(rows)
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
    rows = compare_world_sizes(planner, [2, 5])
    assert (find_least(rows), planner.planned) == (least, [2, 5])
    print_world_sizes(make_console(file=(file := io.StringIO()), width=200), rows)
    assert file.getvalue().endswith("the model is 2; fewer were not tried\n") == (least == 2)


def test_what_is_wrong_with_the_workload_ends_it() -> None:
    def plan(size: int, listen: Listener) -> Plan:
        raise WorkloadError("no model")

    with pytest.raises(WorkloadError, match="no model"):
        compare_world_sizes(plan, [1, 2])


def test_the_table_and_the_records() -> None:
    rows = compare_world_sizes(Planner(layer_bytes=1200 * MIB), [8, 16])
    file = io.StringIO()
    print_world_sizes(make_console(file=file, width=200), rows)
    lines = file.getvalue().splitlines()
    assert lines[0].split() == ["ranks", "fits", "micro-batch", "iter_size", "needed", "peak", "reduce"]
    assert lines[1].split()[:4] == ["8", "no", "-", "-"]
    assert lines[-2].split()[:4] == ["16", "yes", "4", "1"]
    assert lines[-1].startswith("the least number of ranks that trains the model is 10; on 9, micro-batch 1 does not")
    record = json.loads(world_sizes_json(rows))
    assert record["least_world_size"] == 10
    assert [row["world_size"] for row in record["world_sizes"]] == [8, 9, 10, 12, 16]
    assert record["world_sizes"][0]["message"].startswith("micro-batch 1 does not fit: it would take")


def test_a_warning_says_which_rows_it_is_about() -> None:
    about = {1: None, 2: ("of all", "close"), 4: ("of all", "close"), 8: ("of all",)}
    rows = [WorldSize(world_size=size, fits=bool(texts), warnings=texts or ()) for size, texts in about.items()]
    assert world_sizes_warnings(rows) == ["of all", "on 2 and 4 ranks close"]
