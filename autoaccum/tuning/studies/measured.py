"""What was measured once for all trials of a study, as it is kept: the plan, and the throughput that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoaccum.errors import PlanFileError
from autoaccum.planning.records import Plan
from autoaccum.planning.shapes import ShapeError, shape, thaw
from autoaccum.tuning.records import Throughput


def write_measured(plan: Plan, throughput: Throughput) -> dict[str, Any]:
    """Both as what JSON knows."""
    return {"plan": plan.to_json(), "throughput": thaw(throughput)}


def read_plan(record: object) -> Plan:
    """The plan of what `write_measured` wrote.

    Raises:
        ShapeError: It is damaged.
    """
    try:
        return Plan.from_json(str(_of(record, "plan")), source="the plan of the study")
    except PlanFileError as error:
        raise ShapeError(error.message) from None


def read_throughput(record: object) -> Throughput:
    """The throughput of what `write_measured` wrote.

    Raises:
        ShapeError: It is damaged.
    """
    kept = _of(record, "throughput")
    if not isinstance(kept, Mapping):
        raise ShapeError("the throughput is no record")
    try:
        return Throughput(**shape(kept, Throughput))
    except ShapeError as error:
        raise ShapeError(f"in the throughput, {error}") from None


def _of(record: object, name: str) -> object:
    if not isinstance(record, Mapping):
        raise ShapeError("plan and throughput are no record")
    return record.get(name)
