"""A plan for a sharded model says when its gradients are summed over ranks, and what the other way would take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planned import plan_simulated
from synthetic_traces import INSPECTION, SyntheticTracer, linear, make_trace

from autoaccum.devices.child.requests import Request
from autoaccum.devices.trial_requests import PartsRequest
from autoaccum.errors import DoesNotFitError, WorkloadError
from autoaccum.messages import Message
from autoaccum.options import Parallel
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.plan_report import accumulator_line, answer_rows
from autoaccum.units import GIB, MIB


class ShardedTracer(SyntheticTracer):
    """A tracer of a sharded model, whose layers take `more` bytes where gradients are summed with the last part."""

    def __init__(self, more: int | Exception, parallel: Parallel = "fsdp2") -> None:
        super().__init__(inspection=replace(INSPECTION, parallel=parallel))
        self._more = more
        self.ways: list[str | None] = []

    def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
        if isinstance(request, PartsRequest):
            self.ways.append(request.grad_sync)
            if request.grad_sync == "last":
                if isinstance(self._more, Exception):
                    raise self._more
                return make_trace(request.parts, linear(once=3 * MIB + self._more))
        return super().call(request, limit_seconds)


def plan(tracer: ShardedTracer, target: int = 256, memory: int = 2 * GIB, **asked: Any) -> Plan:
    return plan_simulated(tracer, target, memory, world_size=2, gpu="rtx3090", **asked)


def told(made: Plan) -> dict[str, str]:
    return {name: str(value) for name, value in answer_rows(made)}


def test_the_last_part_sums_where_that_fits() -> None:
    made = plan(ShardedTracer(more=8 * MIB))
    assert (made.parallel, made.grad_sync, made.iter_size) == ("fsdp2", "last", 3)
    assert made.peak_bytes == made.grad_sync_peaks["last"] > made.grad_sync_peaks["each"]
    assert made.trials[-1].peak_reserved_bytes == made.peak_bytes
    assert "last: gradients are summed over ranks with the last micro-batch; each takes" in told(made)["grad_sync"]
    assert 'grad_sync="last"' in accumulator_line(made)
    assert Plan.from_json(made.to_json()) == made


def test_each_part_sums_where_the_last_would_take_too_much() -> None:
    tracer = ShardedTracer(more=400 * MIB)
    made, alone = plan(tracer), plan(ShardedTracer(more=0, parallel="ddp"))
    assert made.grad_sync == "each"
    assert tracer.ways[-1] == "last"
    assert made.grad_sync_peaks["each"] == made.peak_bytes == alone.peak_bytes
    assert made.grad_sync_peaks["last"] > made.limit_bytes
    assert "each: gradients are summed over ranks with each micro-batch; last takes" in told(made)["grad_sync"]
    assert (made.trials[-1].parts, made.min_budget_bytes) == (alone.trials[-1].parts, alone.min_budget_bytes)
    assert "grad_sync=" not in accumulator_line(made)
    assert not next(note for note in made.notes if note.code == "predicted").facts["measurable"], (
        "trials on a card would run the whole model"
    )
    assert next(note for note in alone.notes if note.code == "predicted").facts["measurable"]


def test_what_the_last_part_cannot_sum_is_noted() -> None:
    made = plan(ShardedTracer(WorkloadError("gradients are added up in bfloat16")))
    assert (made.grad_sync, [*made.grad_sync_peaks]) == ("each", ["each"])
    assert Message("grad_sync_unusable", {"error": "gradients are added up in bfloat16"}) in made.notes


def test_one_part_sums_once() -> None:
    tracer = ShardedTracer(more=0)
    made = plan(tracer, target=8)
    assert (made.grad_sync, made.iter_size, [*made.grad_sync_peaks]) == ("each", 1, ["each"])
    assert set(tracer.ways) == {None}
    assert "grad_sync" not in told(made)


@pytest.mark.parametrize(
    ("parallel", "hint"),
    [("ddp", "--parallel fsdp2, or more memory"), ("fsdp2", r"more ranks \(--world-size\), or")],
)
def test_what_does_not_fit_may_fit_among_more_ranks(parallel: Parallel, hint: str) -> None:
    with pytest.raises(DoesNotFitError, match=f"activation checkpointing, {hint}"):
        plan(ShardedTracer(more=0, parallel=parallel), memory=300 * MIB)


@pytest.mark.parametrize("mesh", [None, (2,)])
def test_replicated_ranks_have_no_such_choice(mesh: tuple[int, ...] | None) -> None:
    made = plan(ShardedTracer(more=0, parallel="ddp"), mesh=mesh)
    assert (made.parallel, made.mesh, made.grad_sync, made.grad_sync_peaks) == ("ddp", mesh, None, {})
    assert "grad_sync" not in told(made)
