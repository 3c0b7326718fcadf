from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from imported_files import import_file

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import Trial
from autoaccum.devices.inspection import describe_blocks
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.emit import emit_wrapper
from autoaccum.units import MIB
from autoaccum.workload.spec import Workload
from autoaccum.workload.step_recipe import describe_recipe

MakePlan = Callable[..., Plan]
Emit = Callable[..., ModuleType]


def plan_by_hand(workload: Workload, target: int, ceiling: int, **changes: Any) -> Plan:
    """A plan with what is recorded of `workload`, as if `ceiling` had been measured."""
    schedule = make_schedule(target, ceiling)
    model, batch = workload.build_model(), workload.build_batch(3)
    terms = workload.objective.terms(model, batch)
    recorded: dict[str, Any] = {
        "kind": "measured",
        "target_batch": target,
        "micro_batch": schedule.micro_batch,
        "iter_size": schedule.iter_size,
        "micro_batches": schedule.micro_batches,
        "world_size": 1,
        "largest_fit": schedule.micro_batch,
        "capped": False,
        "limit_bytes": 128 * MIB,
        "peak_bytes": None,
        "device": {"name": "cpu", "kind": "cpu"},
        "environment": {},
        "workload": {
            "name": workload.name,
            "digest": "0123456789abcdef",
            "model": type(model).__name__,
            "precision": workload.precision,
            "batchnorm": workload.batchnorm,
            "loss": "loss" if workload.criterion is None else "criterion",
            "savers": workload.savers,
            "recipe": {**describe_recipe(workload.objective, model, batch, terms), **describe_blocks(model)},
        },
        "trials": (Trial(parts=(schedule.micro_batch, schedule.smallest_part), outcome="ok"),),
    }
    return Plan(**{**recorded, **changes})


@pytest.fixture(scope="session")
def make_plan_of() -> MakePlan:
    return plan_by_hand


@pytest.fixture
def emit(tmp_path: Path) -> Emit:
    """Emit the file for a workload (and `target`, `ceiling`), and import it."""
    numbers = count()

    def make(workload: Workload, target: int = 18, ceiling: int = 6, **changes: Any) -> ModuleType:
        path = tmp_path / f"train_step_{next(numbers)}.py"
        path.write_text(emit_wrapper(plan_by_hand(workload, target, ceiling, **changes)), encoding="utf-8")
        return import_file(path)

    return make
