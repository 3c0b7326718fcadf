"""Savers and micro-batch that are chosen together, for the most samples per second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from asking import make_request
from scripted_device import TimedDevice
from torch import nn, ones

from autoaccum.api import plan
from autoaccum.devices.base import Inspection, Outcome
from autoaccum.errors import DoesNotFitError, UsageError
from autoaccum.planning.fastest_savers import plan_fastest_savers
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_setup import PlanSetup

BLOCKS = 4


class RecomputingDevice(TimedDevice):
    """With each recomputed block so many more samples fit, beyond a first number, and updates are a tenth slower."""

    def __init__(self, first: int, each: int, **rules: Any) -> None:
        def outcome(size: int) -> Outcome:
            return "ok" if size <= first + each * self.recomputed else "oom"

        super().__init__(lambda size: min(size, 60) * (1 - 0.1 * self.recomputed), outcome=outcome, **rules)
        self.savers: tuple[str, ...] = ()
        self.timed_with: list[tuple[str, ...]] = []

    @property
    def recomputed(self) -> int:
        return int(self.savers[0].partition("=")[2]) if self.savers else 0

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        self.savers = savers or ()

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        return replace(super().inspect(), savers=self.savers, blocks=BLOCKS)

    def timing(self) -> Any:
        self.timed_with.append(self.savers)
        return super().timing()


def run(device: RecomputingDevice, **request: Any) -> Plan:
    asked = make_request(256, savers="auto", prefer="fastest", **request)
    return plan_fastest_savers(PlanSetup(device, "model.py"), asked)


def test_savers_that_let_more_fit_are_taken_where_that_is_faster() -> None:
    device = RecomputingDevice(16, 16)
    found = run(device)
    assert device.timed_with == [(), ("recompute=1",), ("recompute=2",)]
    assert found.workload["savers"] == ("recompute=2",)
    assert (found.micro_batch, found.largest_fit) == (43, 43)
    assert found.trials[-1].fresh
    assert found.throughput is not None
    assert found.notes[0] == (
        "recompute=2: the most samples per second of the sets of savers that were timed"
        " (no savers with 16, recompute=1 with 28.8, recompute=2 with 34.4)"
    )


def test_none_are_taken_where_they_make_it_slower() -> None:
    found = run(RecomputingDevice(100, 100))
    assert found.workload["savers"] == ()
    assert found.throughput is not None
    assert found.throughput.knee == found.micro_batch == 64


def test_the_least_that_fit_are_among_what_is_timed() -> None:
    device = RecomputingDevice(-2, 1)
    assert run(device).workload["savers"] == ("recompute=4",)
    assert device.timed_with == [("recompute=3",), ("recompute=4",)]


def test_nothing_that_fits_is_a_clear_no() -> None:
    with pytest.raises(DoesNotFitError, match="micro-batch 1 does not fit with any savers"):
        run(RecomputingDevice(-9, 1))


def test_what_cannot_be_timed_is_refused() -> None:
    options: dict[str, Any] = {"target_batch": 2, "savers": "auto", "prefer": "fastest"}
    with pytest.raises(UsageError, match="in a process of their own"):
        plan(model=nn.Linear(1, 1), batch=ones(2, 1), loss=lambda m, b: m(b).sum(), **options)
