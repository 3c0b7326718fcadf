"""Sets of savers compared on a simulated card: what a plan with each of them finds, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from asking import make_request, make_settings
from in_process_tracer import InProcessTracer
from small_blocks import blocks_source

from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.update_cost import UpdateCost
from autoaccum.errors import DoesNotFitError
from autoaccum.options import OFFLOADS
from autoaccum.planning.plan_events import Event, SaversTried
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_table import SaverTable, add_costs, compare_savers
from autoaccum.planning.saver_trials import SaverTrials
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.units import MIB, MemorySize

SHARE = 8


def device_with(path: str, memory_bytes: int, **options: Any) -> SimulatedDevice:
    card = find_card("rtx3090")
    return SimulatedDevice(
        card,
        lambda: InProcessTracer(make_settings(path, SHARE, **options), card),
        share=SHARE,
        torch_version=(2, 13),
        memory=MemorySize(bytes=memory_bytes),
        environment={},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("workload") / "blocks.py"
    file.write_text(blocks_source(3, hidden=512, length=1024, width=128))
    return str(file)


def compare(device: SimulatedDevice, events: list[Event] | None = None, **asked: Any) -> SaverTable:
    listen = (lambda event: None) if events is None else events.append
    trials = SaverTrials(device, make_request(SHARE, gpu="rtx3090"), SearchLimits(None, None), listen)
    return compare_savers(trials, "blocks.py", **asked)


@pytest.mark.slow
def test_rows_are_what_a_plan_with_these_savers_finds(path: str) -> None:
    events: list[Event] = []
    with device_with(path, 126 * MIB) as device:
        table = compare(device, events)
    first, *_, last = table.rows
    assert (first.savers, first.recomputed) == ((), 0)
    assert first.micro_batch < last.micro_batch <= SHARE
    assert any(isinstance(event, SaversTried) for event in events)
    times = [row.relative_time for row in table.rows]
    assert times == sorted(times)
    with device_with(path, 126 * MIB, savers=last.savers) as plain:
        found = plan_on_device(PlanSetup(plain, "blocks.py", isolated=False), make_request(SHARE, gpu="rtx3090"))
    assert (last.micro_batch, last.iter_size) == (found.micro_batch, found.iter_size)
    assert found.workload["savers"] == last.savers
    recomputing = next(row for row in table.rows if row.savers and row.savers[0].startswith("recompute"))
    assert 0 < recomputing.recomputed < 1 / 3
    offloading = next(row for row in table.rows if set(row.savers) & set(OFFLOADS))
    assert offloading.moved_bytes > first.moved_bytes


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
def test_nothing_fits(path: str) -> None:
    with (
        device_with(path, 8 * MIB) as small,
        pytest.raises(DoesNotFitError, match="micro-batch 1 does not fit with any savers"),
    ):
        compare(small)


@pytest.mark.slow
def test_what_fits_whole_needs_no_savers(path: str) -> None:
    with device_with(path, 8 * 1024 * MIB) as large:
        table = compare(large)
    assert [(row.savers, row.micro_batch) for row in table.rows] == [((), SHARE)]
